"""Data that is read where it lies, straight from the process of another rank of this node.

[Note: loans] Data need not be copied into a window if its memory stays unchanged until the collective ends. Instead the owner says where
the data is, in a message on its stream or in a letter, and each reader copies it from there to where it belongs with one system call
(process_vm_readv, which works only where the system lets one process read the other's memory). So each byte is copied once instead of
twice, and nobody waits for room in a window. MPI implementations call this a rendezvous protocol with cross-memory attach.

A loan ends with its collective, and a successful collective ends when each reader has said that it has read everything. Nobody waits
for the readers of a failed one: the lender revokes the loan before the caller may use the memory again. A token tells a reader which of
the two happened: a number in the lender's memory that the same call reads, after the data. If the number is not the one that the lender
announced, the data is worthless: the lender has given up, or it has died and its process number belongs to another process.
"""

import ctypes
import errno
import itertools
import os
import secrets
import struct
from collections.abc import Sequence

import numpy as np

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.wire import Buffer, LoanRevoked

_GONE = (errno.ESRCH, errno.EFAULT)  # the process is gone, or the memory that it had there


_SPAN = "PN"  # struct iovec
_SPAN_BYTES = struct.calcsize(_SPAN)
_MOST_SPANS = 1024  # in one call: IOV_MAX
_Place = tuple[int, int]  # an address, and the number of bytes from there on


class Secret:
    """Bytes at a known address of this process; another process reads them to find out whether it can read this process's memory."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._copy = np.frombuffer(bytearray(content), np.uint8)
        self.address = _address(self._copy)


_tokens = itertools.count(secrets.randbits(63))  # another process begins at another number


class Loan:
    """Permission to read the data that this rank lends in one collective, valid until the collective ends."""

    def __init__(self) -> None:
        self._told = next(_tokens)
        self._token = np.array([self._told], np.uint64)

    def of(self, data: Buffer) -> mesh_pb2.Loan:
        """Describe `data` for a reader. It must stay unchanged until all readers have returned it, or the loan is revoked."""
        view = np.frombuffer(data, np.uint8)
        return mesh_pb2.Loan(address=_address(view), size=len(view), token_address=_address(self._token), token=self._told)

    def letter(self, lots: Sequence[Sequence[np.ndarray]], note: bytes = b"") -> bytes:
        """The same for several lots, as the bytes of a letter: first a word that the lender can mark, then the lots, then a note. Each
        lot is a list of pieces that a reader takes as one array. See `Lender`."""
        words = [0, _address(self._token), self._told, len(lots), *map(len, lots)]
        words += [word for lot in lots for piece in lot for word in (_address(piece), piece.nbytes)]
        return np.array(words, np.uint64).tobytes() + note

    def revoke(self) -> None:
        """Make worthless everything that is read from now on, or is being read at this moment."""
        self._token[0] = ~np.uint64(self._told)


class Borrowed:
    """Data of another process that has not been read yet."""

    returns = True

    def __init__(self, pid: int, pieces: Sequence[_Place], token_address: int, token: int) -> None:
        """`pieces` are the places that make up the data, end to end."""
        self._pid = pid
        self._pieces = pieces
        self._token_address = token_address
        self._token = token
        self.size = sum(size for _, size in pieces)

    @classmethod
    def of(cls, pid: int, loan: mesh_pb2.Loan) -> "Borrowed":
        return cls(pid, [(loan.address, loan.size)], loan.token_address, loan.token)

    def read(self, start: int, target: "np.ndarray") -> None:
        """Copy the bytes from `start` on into `target`, a contiguous array, and let other threads run meanwhile.

        Raises LoanRevoked if the bytes are no longer lent, and ProtocolError if the system forbids reading them or they never were lent.
        """
        size, address = target.nbytes, _address(target)
        if start + size > self.size:
            raise ProtocolError(f"process {self._pid} lends {start + size - self.size} bytes less than it should")
        places = cut(self._pieces, start, size)
        if len(places) < _MOST_SPANS:
            self._read(places, address, size)
            return
        for first in range(0, len(places), _MOST_SPANS - 1):
            some = places[first : first + _MOST_SPANS - 1]
            size = sum(size for _, size in some)
            self._read(some, address, size)
            address += size

    def _read(self, places: Sequence[_Place], address: int, size: int) -> None:
        token = ctypes.c_uint64()
        here = _spans([(address, size), (ctypes.addressof(token), 8)])
        there = _spans([*places, (self._token_address, 8)])
        count, error = _read(self._pid, here, there)
        if count < 0 and error not in _GONE:
            raise ProtocolError(f"the memory of process {self._pid} cannot be read any more: {os.strerror(error)}")
        if count != size + 8 or token.value != self._token:
            raise LoanRevoked


def cut(pieces: Sequence[_Place], start: int, size: int) -> list[_Place]:
    """Find the places of `size` bytes from `start` on, counting through `pieces` as if they lay end to end."""
    places: list[_Place] = []
    for address, length in pieces:
        if start < length and size:
            taken = min(length - start, size)
            places.append((address + start, taken))
            size -= taken
        start = max(start - length, 0)
    return places


class Lender:
    """Another process that lends lots of data, as its letter says. Raises ValueError if the letter makes no sense."""

    def __init__(self, pid: int, letter: Buffer) -> None:
        self._pid = pid
        _, self._token_address, self._token, lots = np.frombuffer(letter, np.uint64, 4).tolist()
        counts = _words(letter, 4, lots)
        words = _words(letter, 4 + lots, 2 * sum(counts))
        self._lots: list[list[_Place]] = []
        for count in counts:
            mine, words = words[: 2 * count], words[2 * count :]
            self._lots.append(list(zip(mine[::2], mine[1::2], strict=True)))
        self.note = bytes(letter[8 * (4 + lots + 2 * sum(counts)) :])

    def part(self, lot: int, start: int, size: int) -> Borrowed:
        """Bytes of one of its lots."""
        return Borrowed(self._pid, cut(self._lots[lot], start, size), self._token_address, self._token)


def _words(letter: Buffer, first: int, count: int) -> list[int]:
    words: list[int] = np.frombuffer(letter, np.uint64, count, 8 * first).tolist() if count else []
    return words


def can_read(offer: mesh_pb2.WindowOffer) -> bool:
    """Whether the memory of the process that made the offer can be read from here."""
    found = np.empty(len(offer.secret), np.uint8)
    here, there = _spans([(_address(found), found.nbytes)]), _spans([(offer.secret_address, found.nbytes)])
    count, _ = _read(offer.pid, here, there)
    return count == found.nbytes and secrets.compare_digest(found.tobytes(), offer.secret)


def _spans(places: Sequence[_Place]) -> bytes:
    return struct.pack(_SPAN * len(places), *itertools.chain.from_iterable(places))


def _read(pid: int, here: bytes, there: bytes) -> tuple[int, int]:
    """Copy from the spans `there` into those `here`. Returns how many bytes were copied, or -1 and the error number."""
    if _process_vm_readv is None:
        return -1, errno.ENOSYS
    count: int = _process_vm_readv(pid, here, len(here) // _SPAN_BYTES, there, len(there) // _SPAN_BYTES, 0)
    return count, ctypes.get_errno()


def _address(array: "np.ndarray") -> int:
    address: int = array.__array_interface__["data"][0]
    return address


_process_vm_readv = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)  # Linux has it
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = (
        ctypes.c_int,
        *(ctypes.c_char_p, ctypes.c_ulong),
        *(ctypes.c_char_p, ctypes.c_ulong),
        ctypes.c_ulong,
    )
