"""HTTP/2 frames as bytes (RFC 9113, sections 4 and 6)."""

import struct
from collections.abc import Iterator
from enum import IntEnum, IntFlag

from shardnet.errors import ProtocolError
from shardnet.printable import printable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES = 9
PING_BYTES = 8
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65535
DEFAULT_FRAME_BYTES = 16384  # the largest payload that any peer takes
MAX_FRAME_BYTES = 2**24 - 1

_HEAD = struct.Struct(">HBBBI")  # length as 16 + 8 bits, type, flags, stream
_SETTING = struct.Struct(">HI")
_U32 = struct.Struct(">I")


class Type(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Flags(IntFlag):
    NONE = 0
    ACK = 0x1  # of SETTINGS and PING
    END_STREAM = 0x1  # of DATA and HEADERS
    END_HEADERS = 0x4
    PADDED = 0x8
    PRIORITY = 0x20


class Setting(IntEnum):
    ENABLE_PUSH = 2
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    # Ours, which others must ignore (RFC 9113, section 6.5.2): the caller speaks this HTTP/2 and opens a mesh stream.
    SHARDNET = 0x5D4E


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    REFUSED_STREAM = 7
    CANCEL = 8
    INADEQUATE_SECURITY = 12


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return _HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream)


def frame(kind: Type, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return head(len(payload), kind, flags, stream) + payload


def read_head(data: bytes | bytearray | memoryview, at: int) -> tuple[int, int, int, int]:
    """(length of the payload, type, flags, stream) of the head at this place."""
    high, low, kind, flags, stream = _HEAD.unpack_from(data, at)
    return high << 8 | low, kind, flags, stream & 0x7FFFFFFF


def settings(values: dict[Setting, int]) -> bytes:
    return frame(Type.SETTINGS, Flags.NONE, 0, b"".join(_SETTING.pack(key, value) for key, value in values.items()))


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    if len(payload) % _SETTING.size:
        raise ProtocolError("the length of a SETTINGS frame is not a multiple of 6 bytes")
    return iter(_SETTING.iter_unpack(payload))


def window_update(stream: int, increment: int) -> bytes:
    return frame(Type.WINDOW_UPDATE, Flags.NONE, stream, _U32.pack(increment))


def reset(stream: int, code: ErrorCode) -> bytes:
    return frame(Type.RST_STREAM, Flags.NONE, stream, _U32.pack(code))


def goaway(code: ErrorCode, why: str) -> bytes:
    """A GOAWAY frame that ends the connection and says that no stream was processed."""
    return frame(Type.GOAWAY, Flags.NONE, 0, _U32.pack(0) + _U32.pack(code) + why.encode())


def inadequate_security(answer: bytes) -> str | None:
    """The text of a server whose answer begins with a GOAWAY for INADEQUATE_SECURITY; None for any other answer."""
    at = 0
    while at + HEAD_BYTES <= len(answer):
        length, kind, _, _ = read_head(answer, at)
        payload = answer[at + HEAD_BYTES : at + HEAD_BYTES + length]
        if kind == Type.GOAWAY and payload[4:8] == _U32.pack(ErrorCode.INADEQUATE_SECURITY):
            return printable(payload[8:].decode(errors="replace"))
        at += HEAD_BYTES + length
    return None


def read_u32(payload: bytes) -> int:
    """The one number that WINDOW_UPDATE and RST_STREAM carry."""
    if len(payload) != _U32.size:
        raise ProtocolError(f"a frame that carries one number has {len(payload)} bytes instead of 4")
    value: int = _U32.unpack(payload)[0]
    return value


def unpad(payload: bytes, flags: int, *, priority: bool = False) -> bytes:
    """The payload of a DATA or HEADERS frame without padding and, for HEADERS, priority."""
    padding = 0
    if flags & Flags.PADDED:
        if not payload:
            raise ProtocolError("a padded frame is empty")
        padding, payload = payload[0], payload[1:]
    if priority and flags & Flags.PRIORITY:
        payload = payload[5:]
    if padding > len(payload):
        raise ProtocolError("the padding of a frame is longer than its payload")
    return payload[: len(payload) - padding]
