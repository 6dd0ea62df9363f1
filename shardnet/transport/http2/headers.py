"""The header blocks of a gRPC call (gRPC over HTTP/2, "PROTOCOL-HTTP2"), and its status."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import quote, unquote

import grpc
from hpack import Decoder, Encoder, HPACKError

from shardnet.config import KIB
from shardnet.errors import ProtocolError
from shardnet.printable import printable

Headers = tuple[tuple[str, str], ...]

# Of a header block, as it comes and decoded. A worker's have 1 KiB. One byte can decode to a whole header, so a block of 64 KiB would hold
# the loop for 0.3 s.
MAX_BYTES = 16 * KIB
_MAX_DETAILS = 1000  # characters, each of up to 12 bytes when it is quoted
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


@dataclass(frozen=True, slots=True)
class Status:
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""

    @classmethod
    def read(cls, trailers: Headers) -> Self:
        """Read the status from the trailers of a reply. Without a `grpc-status` a proxy has answered: its HTTP status is the reason."""
        found = dict(trailers)
        try:
            code = _CODES[int(found["grpc-status"])]
        except (KeyError, ValueError):
            http = found.get(":status", "none")
            return cls(grpc.StatusCode.UNAVAILABLE, f"no gRPC status; HTTP status {http}")
        return cls(code, printable(unquote(found.get("grpc-message", ""))))

    def trailers(self) -> Headers:
        number = ("grpc-status", str(self.code.value[0]))
        return (number, ("grpc-message", quote(self.details[:_MAX_DETAILS], safe=_PRINTABLE))) if self.details else (number,)


def request(authority: str, path: str, metadata: Headers) -> Headers:
    return (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
        ("user-agent", "shardnet"),
        *metadata,
    )


def reply(metadata: Headers) -> Headers:
    return ((":status", "200"), ("content-type", "application/grpc"), *metadata)


class HeaderCodec:
    """HPACK for one connection, both ways; blocks must be decoded in the order in which they come."""

    def __init__(self) -> None:
        self._encoder = Encoder()
        self._decoder = Decoder(max_header_list_size=MAX_BYTES)

    def encode(self, headers: Headers) -> bytes:
        return self._encoder.encode(headers)

    def decode(self, block: bytes) -> Headers:
        """Raises ProtocolError if `block` is not a header block."""
        try:
            return tuple((str(name), str(value)) for name, value in self._decoder.decode(block))
        except (HPACKError, UnicodeDecodeError) as error:
            raise ProtocolError("a header block cannot be decoded") from error
