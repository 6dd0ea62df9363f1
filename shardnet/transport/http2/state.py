"""`CallState`: what the frames of a call mean. No I/O."""

from collections import deque

from shardnet.errors import ProtocolError
from shardnet.printable import printable
from shardnet.transport.http2 import frames
from shardnet.transport.http2.frames import ErrorCode, Flags, Setting, Type
from shardnet.transport.http2.headers import MAX_BYTES, HeaderCodec, Headers
from shardnet.transport.http2.writing import FrameWriter

_REFILL_BYTES = frames.MAX_WINDOW // 2  # the windows are filled up again when so many bytes have come
_MAX_BLOCKS = 4  # header blocks that nobody has asked for yet; a call has two at most


class CallBroken(Exception):
    """The connection is gone, or the call was cut. The text says why, in words for a user."""


class CallState:
    """What the peer has said so far; answers go to the writer. Lives as long as the call.

    Raises CallBroken if the peer breaks off the call, ProtocolError for frames that the peer may not send.
    """

    def __init__(self, stream: int, writer: FrameWriter) -> None:
        self.codec = HeaderCodec()
        self.headers: deque[Headers] = deque()  # blocks that came and that nobody has taken yet
        self.ended = False  # the peer's half of the stream
        self._stream = stream
        self._writer = writer
        self._received = 0  # bytes since the windows were filled up
        self._block: bytearray | None = None  # a header block that is not complete
        self._block_ends = False  # that block also ends the stream

    @property
    def has_news(self) -> bool:
        """Whether there is something that one could wait for."""
        return self.ended or bool(self.headers)

    def on_data(self, stream: int, flow_bytes: int, *, end: bool) -> None:
        self._received += flow_bytes
        if self._received >= _REFILL_BYTES:
            for each in (0, self._stream):
                self._writer.control(frames.window_update(each, self._received))
            self._received = 0
        if end and stream == self._stream:
            self.ended = True

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if (kind == Type.CONTINUATION) != (self._block is not None):
            raise ProtocolError("another frame interrupted a header block, or a CONTINUATION frame came without a header block")
        if kind in (Type.HEADERS, Type.CONTINUATION) and stream != self._stream:  # before it is decoded, which takes long
            raise ProtocolError(f"a header block came for stream {stream}, but a connection carries only one call")
        match kind:
            case Type.HEADERS:
                self._block, self._block_ends = bytearray(), bool(flags & Flags.END_STREAM)
                self._on_block(flags, frames.unpad(payload, flags, priority=True))
            case Type.CONTINUATION:
                self._on_block(flags, payload)
            case Type.SETTINGS if not flags & Flags.ACK:
                self._on_settings(payload)
            case Type.PING if not flags & Flags.ACK:
                if len(payload) != frames.PING_BYTES:
                    raise ProtocolError(f"a PING frame has {len(payload)} bytes instead of 8")
                self._writer.control(frames.frame(Type.PING, Flags.ACK, 0, payload))
            case Type.WINDOW_UPDATE:
                self._writer.widen(stream, frames.read_u32(payload) & frames.MAX_WINDOW)
            case Type.RST_STREAM if stream == self._stream:
                self._on_reset(frames.read_u32(payload))
            case Type.GOAWAY:
                self._on_goaway(payload)

    def _on_block(self, flags: int, block: bytes) -> None:
        assert self._block is not None
        self._block += block
        if len(self._block) > MAX_BYTES:
            raise ProtocolError("a header block is too long")
        if not flags & Flags.END_HEADERS:
            return
        found, self._block = self.codec.decode(bytes(self._block)), None
        if len(self.headers) == _MAX_BLOCKS:
            raise ProtocolError("too many header blocks")
        self.headers.append(found)
        if self._block_ends:
            self.ended = True

    def _on_settings(self, payload: bytes) -> None:
        for key, value in frames.read_settings(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                self._writer.set_initial_window(value)
            elif key == Setting.MAX_FRAME_SIZE:
                self._writer.set_max_frame(value)
        self._writer.control(frames.frame(Type.SETTINGS, Flags.ACK, 0))

    def _on_reset(self, code: int) -> None:
        if self.ended and code == ErrorCode.NO_ERROR:
            return  # the peer has answered and needs no more of our data
        raise CallBroken("it closed the stream" if code == ErrorCode.CANCEL else f"it reset the stream (HTTP/2 error {code})")

    def _on_goaway(self, payload: bytes) -> None:
        code = int.from_bytes(payload[4:8])
        if code != ErrorCode.NO_ERROR:  # after a GOAWAY without an error the call may still finish
            text = printable(payload[8:].decode(errors="replace")) or f"HTTP/2 error {code}"
            raise CallBroken(f"its connection broke ({text})")
