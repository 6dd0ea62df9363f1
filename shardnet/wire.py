"""Chunks as bytes: protobuf on the wire, without copying the payload through a protobuf object.

[Note: canonical layout] Fields 1 to 6 of `shardnet.v1.Chunk` are fixed-width, always present and in order, so the
head of every chunk is the same 42 bytes long. Then comes the optional control message. `data` comes last, after enough
padding to put it at a multiple of 16: sums of unaligned floats take 1.4 times as long. So a chunk is written as its
head followed by its data, sent from where it lies, and read by one `struct.unpack` and a view of the rest. The bytes are
those that any protobuf library writes for the message. What another library wrote in another order is read through
protobuf (tests/test_wire.py proves both).

The checksum is CRC-32C over fields 1 to 5 and everything after field 6: a flipped bit in an offset is as bad as one
in the data. CRC-32C because processors have an instruction for it: 24 GB/s here, while zlib.crc32 reaches 3.7. Under TLS,
whose own checksum nobody can forge, it is 0 and not checked: both ends know that from their connection. A ring passes
frames on as they came, so a frame without a checksum gets one when it leaves over a connection that needs it.
"""

import struct
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from crc32c import crc32c
from google.protobuf.message import DecodeError

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2

Buffer = bytes | bytearray | memoryview

# tag and value of: epoch fixed32, group fixed64, sequence fixed64, block fixed32, offset fixed64, crc32c fixed32
_HEAD: Final = struct.Struct("<BIBQBQBIBQBI")
_TAGS: Final = (0x0D, 0x11, 0x19, 0x25, 0x29, 0x35)
_CHECKSUM_BYTES: Final = 4  # at the end of the head
_CONTROL_TAG: Final = 0x3A
_PADDING_TAG: Final = 0x42
_DATA_TAG: Final = 0x7A
_CHECKED: Final = struct.Struct("<IQQIQ")
_EMPTY: Final = memoryview(b"")
_ALIGNMENT: Final = 16  # the alignment that malloc gives to the whole message


class LoanRevoked(Exception):
    """Lent data is gone before it was read: the rank that lent it has failed, and says so."""


class Lent(Protocol):
    """Data that still lies in its sender's memory, to be copied from there."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def returns(self) -> bool:
        """Whether the sender waits until the data has been read."""

    def read(self, start: int, target: np.ndarray) -> None:
        """Copy the bytes from `start` on into `target`, a contiguous array. Raises LoanRevoked."""


@dataclass(frozen=True, slots=True)
class InPlace:
    """Data that its sender has written where it belongs, in memory that sender and receiver share."""

    size: int
    returns: bool = False

    def read(self, start: int, target: np.ndarray) -> None:
        """Do nothing: the data is already there."""


@dataclass(slots=True)
class Chunk:
    """A piece of a collective's data, a control message, or both (a small collective's whole traffic)."""

    epoch: int
    group: int
    sequence: int
    block: int = 0
    offset: int = 0  # bytes into the block
    data: Buffer = _EMPTY  # a view of the sender's buffer, or of `frame`
    control: mesh_pb2.Control | None = None
    frame: Buffer | None = None  # the encoded form, if known: a ring passes it on as it came
    lent: Lent | None = None  # in place of `data`
    came_ns: int = 0  # by time.monotonic_ns; set if the chunk is kept until this rank asks for it

    @property
    def size(self) -> int:
        """Bytes of data, here or lent."""
        return len(self.data) if self.lent is None else self.lent.size

    def saying(self, control: mesh_pb2.Control) -> "Chunk":
        """A chunk for the same place with a control message instead of data."""
        return Chunk(self.epoch, self.group, self.sequence, self.block, self.offset, control=control)

    @property
    def came_through_memory(self) -> bool:
        """Whether the data of a chunk that has arrived came by another way than its stream."""
        return self.lent is not None or (self.control is not None and self.control.HasField("window_piece"))


def encode(chunk: Chunk, *, sealed: bool = True) -> tuple[Buffer, ...]:
    """The chunk in canonical layout, as buffers to be sent one after the other; the payload is not copied.

    sealed  with a checksum
    """
    if chunk.frame is not None and not (sealed and _is_open(chunk.frame)):
        return (chunk.frame,)
    behind = b"" if chunk.control is None else _field(_CONTROL_TAG, chunk.control.SerializeToString())
    data = memoryview(chunk.data).cast("B") if len(chunk.data) else _EMPTY
    if data:
        start = _data_start(data)
        unaligned = _HEAD.size + len(behind) + 2 + len(start)  # with a padding field that is empty
        behind += _field(_PADDING_TAG, bytes(-unaligned % _ALIGNMENT)) + start
    return _join(chunk, behind, data, sealed)


def _join(chunk: Chunk, behind: bytes, data: memoryview, sealed: bool) -> tuple[bytes, memoryview]:
    """The head, with the checksum if `sealed`, joined with `behind`, and then the data."""
    checksum = crc32c(data, crc32c(behind, crc32c(_checked(chunk)))) if sealed else 0
    epoch, group, sequence, block, offset, crc = _TAGS
    head = _HEAD.pack(
        epoch, chunk.epoch, group, chunk.group, sequence, chunk.sequence, block, chunk.block, offset, chunk.offset, crc, checksum
    )
    return head + behind, data


def _is_open(frame: Buffer) -> bool:
    """Whether a canonical frame has no checksum. One in four billion has a checksum of 0, and is needlessly encoded again."""
    return not any(frame[_HEAD.size - _CHECKSUM_BYTES : _HEAD.size])


def decode(frame: Buffer, *, sealed: bool = True) -> Chunk:
    """The chunk in these bytes; its data is a view of them. Raises ProtocolError if they are malformed or, if sealed, damaged."""
    if len(frame) >= _HEAD.size:
        fields = _HEAD.unpack_from(frame)
        if fields[::2] == _TAGS:
            _, epoch, _, group, _, sequence, _, block, _, offset, _, checksum = fields
            chunk = Chunk(epoch, group, sequence, block, offset, frame=frame)
            if not sealed or crc32c(memoryview(frame)[_HEAD.size :], crc32c(_checked(chunk))) == checksum:
                _read_behind(frame, chunk)
                return chunk
    return _decode_any(frame, sealed)


def _read_behind(frame: Buffer, chunk: Chunk) -> None:
    """Read what follows the head of a canonical frame."""
    at = _HEAD.size
    if at < len(frame) and frame[at] == _CONTROL_TAG:
        size, at = _read_varint(frame, at + 1)
        if at + size > len(frame):
            raise ProtocolError(f"a chunk announces {size} bytes of control but carries {len(frame) - at}")
        chunk.control = _control(bytes(frame[at : at + size]))
        at += size
    if at < len(frame) and frame[at] == _PADDING_TAG:
        size, at = _read_varint(frame, at + 1)
        if at + size > len(frame):
            raise ProtocolError(f"a chunk announces {size} bytes of padding but carries {len(frame) - at}")
        at += size
    if at < len(frame):
        if frame[at] != _DATA_TAG:
            raise ProtocolError(f"unexpected field tag {frame[at]:#x} in a chunk")
        size, at = _read_varint(frame, at + 1)
        if at + size != len(frame):
            raise ProtocolError(f"a chunk announces {size} bytes of data but carries {len(frame) - at}")
        chunk.data = memoryview(frame)[at:]


def _decode_any(frame: Buffer, sealed: bool) -> Chunk:
    """Read what another protobuf library wrote in another order, or find out that it is damaged."""
    message = mesh_pb2.Chunk()
    try:
        message.ParseFromString(bytes(frame))
    except DecodeError as error:
        raise ProtocolError(f"{len(frame)} bytes arrived that are not a valid chunk") from error
    chunk = Chunk(message.epoch, message.group, message.sequence, message.block, message.offset)
    data = memoryview(message.data)
    behind = _field(_CONTROL_TAG, message.control.SerializeToString()) if message.HasField("control") else b""
    if message.HasField("padding"):
        behind += _field(_PADDING_TAG, message.padding)
    canonical = b"".join(_join(chunk, behind + _data_start(data) if data else behind, data, sealed))
    if sealed and _HEAD.unpack_from(canonical)[-1] != message.crc32c:
        place = f"group {message.group:#x} #{message.sequence} block {message.block} offset {message.offset}"
        raise ProtocolError(f"checksum of a chunk of {len(frame)} bytes does not match ({place})")
    return decode(canonical, sealed=sealed)


def _checked(chunk: Chunk) -> bytes:
    return _CHECKED.pack(chunk.epoch, chunk.group, chunk.sequence, chunk.block, chunk.offset)


def _control(data: bytes) -> mesh_pb2.Control:
    try:
        return mesh_pb2.Control.FromString(data)
    except DecodeError as error:
        raise ProtocolError("the control part of a chunk is malformed") from error


def _field(tag: int, content: bytes) -> bytes:
    return bytes((tag, *_varint(len(content)))) + content


def _data_start(data: memoryview) -> bytes:
    return bytes((_DATA_TAG, *_varint(len(data))))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(frame: Buffer, start: int) -> tuple[int, int]:
    value = shift = 0
    for at in range(start, min(start + 5, len(frame))):  # a length above 2^35 is no length
        value |= (frame[at] & 0x7F) << shift
        if frame[at] < 0x80:
            return value, at + 1
        shift += 7
    raise ProtocolError("a length in a chunk is malformed")
