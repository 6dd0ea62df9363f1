"""`View`: the window of another rank of this node."""

import mmap
from contextlib import suppress
from hmac import compare_digest

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory.memfd import Stranger, found
from shardnet.transport.shared_memory.window import HEADER_BYTES, NAME, SECRET_BYTES

_REPORTS = 4  # per time that the whole window is written: fewer cost less, but its owner may have to wait and ask
_MAX_POSITION = 1 << 63  # far beyond what is ever written; the end of a piece must be a number that fits into a message


class View:
    """Maps the window for reading; lives as long as the mesh."""

    def __init__(self, offer: mesh_pb2.WindowOffer) -> None:
        """Raises OSError, saying why, if it is not in this machine's memory or not ours to see."""
        self._capacity = offer.capacity
        self._map = _find(offer)
        self._data = memoryview(self._map)[HEADER_BYTES:]
        self._taken = 0  # the end of the last piece that was read
        self._reported = 0

    def read(self, piece: mesh_pb2.WindowPiece) -> memoryview:
        """The piece's bytes, which stay unchanged until it is released. Raises ProtocolError if there can be no such piece."""
        start = piece.position % self._capacity
        if not piece.size or start + piece.size > self._capacity or not self._taken <= piece.position < _MAX_POSITION:
            raise ProtocolError(
                f"{piece.size} bytes at position {piece.position} are not a valid piece of a window of {self._capacity} bytes"
            )
        return self._data[start : start + piece.size]

    def take(self, piece: mesh_pb2.WindowPiece) -> bool:
        """The piece was read; returns whether it is time to tell the owner."""
        self._taken = piece.position + piece.size
        return self._taken - self._reported >= self._capacity // _REPORTS

    @property
    def owes_report(self) -> bool:
        """Whether pieces were read that have not been reported to the owner yet."""
        return self._taken > self._reported

    def report(self) -> mesh_pb2.WindowReleased:
        self._reported = self._taken
        return mesh_pb2.WindowReleased(position=self._taken)

    def close(self) -> None:
        with suppress(BufferError):  # somebody still uses the data: the mapping goes with the last user
            self._data.release()
            self._map.close()


def _find(offer: mesh_pb2.WindowOffer) -> mmap.mmap:
    if not offer.capacity:
        raise OSError("it has offered a window of 0 bytes")
    size = HEADER_BYTES + offer.capacity
    with found(NAME, offer.pid, offer.descriptor, size) as descriptor:
        mapped = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
    if not compare_digest(mapped[:SECRET_BYTES], offer.secret):
        mapped.close()
        raise Stranger
    return mapped
