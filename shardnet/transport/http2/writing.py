"""Cuts outgoing messages into frames as the peer's windows allow. No I/O.

[Note: flow control] A peer takes only as much data as the windows allow that it gave, one for the connection and one for the
stream. Our own end opens both as far as HTTP/2 can, because it takes arriving data at once and TCP holds up a sender that is
too fast; a window smaller than the data under way would hold up the sender for nothing. Other peers, such as grpcio or a proxy,
give smaller windows, and we keep to them.
"""

import asyncio
import itertools
from collections import deque
from dataclasses import dataclass

from shardnet.errors import ProtocolError
from shardnet.transport.http2.frames import DEFAULT_FRAME_BYTES, DEFAULT_WINDOW, HEAD_BYTES, MAX_FRAME_BYTES, MAX_WINDOW, Flags, Type, head

_BATCH_BYTES = 64 * 1024  # small messages are joined up to this size into one write
_MAX_CONTROL_BYTES = 128 * 1024
_MAX_BUFFERS = 64  # of one write; the system's limit is 1024


@dataclass(slots=True)
class _Message:
    parts: deque[memoryview]  # the part that is left to send
    left: int  # bytes of them
    done: "asyncio.Future[None] | None"
    frame: bytes = b""  # instead of parts: a ready frame that waits for its turn


class FrameWriter:
    """Messages of one stream and control frames, in order, as buffers for the socket. The messages' buffers are not
    copied: they must stay as they are until `done`."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self.stream_window = DEFAULT_WINDOW
        self.connection_window = DEFAULT_WINDOW
        self.initial_window = DEFAULT_WINDOW
        self.max_frame_bytes = DEFAULT_FRAME_BYTES
        self.queued_bytes = 0  # of messages
        self.sent_bytes = 0  # of everything
        self.data_end = 0  # what `sent_bytes` will be when the last DATA frame that was cut is out
        self._cut_bytes = 0
        self._control = bytearray()  # frames
        self._messages: deque[_Message] = deque()
        self._buffers: list[memoryview] = []  # whole frames, on their way
        self._finished: list[_Message] = []  # messages that are done when the buffers are out

    @property
    def unsent_bytes(self) -> int:
        """How many bytes of messages and frames are not out yet."""
        return self.queued_bytes + self._cut_bytes - self.sent_bytes

    @property
    def is_pending(self) -> bool:
        """Whether anything waits to go out."""
        return bool(self._control or self._messages or self._buffers)

    @property
    def has_control(self) -> bool:
        """Whether control frames wait."""
        return bool(self._control)

    def control(self, frame: bytes) -> None:
        """Send a control frame before the next message. Raises ProtocolError if a peer asks for answers without end and reads
        none."""
        self._control += frame
        if len(self._control) > _MAX_CONTROL_BYTES:
            raise ProtocolError("too many control frames wait to be sent, because the peer does not read")

    def message(self, parts: list[memoryview], done: "asyncio.Future[None] | None") -> None:
        """Send a message; `done` ends when it is out, or with the reason why it never will be."""
        left = sum(map(len, parts))
        self.queued_bytes += left
        self._messages.append(_Message(deque(parts), left, done))

    def behind(self, frame: bytes) -> None:
        """Send a frame after the last message, such as one that ends the stream."""
        self._messages.append(_Message(deque(), 0, None, frame))

    def end(self) -> None:
        """End the stream after the last message."""
        self.behind(head(0, Type.DATA, Flags.END_STREAM, self._stream))

    def widen(self, stream: int, increment: int) -> None:
        """Take note that the peer takes `increment` bytes more."""
        if stream == 0:
            self.connection_window += increment
        elif stream == self._stream:
            self.stream_window += increment
        if not increment or max(self.connection_window, self.stream_window) > MAX_WINDOW:
            raise ProtocolError(f"a WINDOW_UPDATE frame adds {increment} bytes, which is zero or more than a window can hold")

    def set_initial_window(self, value: int) -> None:
        if value > MAX_WINDOW:
            raise ProtocolError(f"the peer asks for an initial window of {value} bytes, which is more than HTTP/2 allows")
        self.stream_window += value - self.initial_window
        self.initial_window = value

    def set_max_frame(self, value: int) -> None:
        if not DEFAULT_FRAME_BYTES <= value <= MAX_FRAME_BYTES:
            raise ProtocolError(f"the peer asks for a maximum frame size of {value} bytes, which HTTP/2 does not allow")
        self.max_frame_bytes = value

    def buffers(self) -> list[memoryview]:
        """The buffers that can be written now; empty if there is nothing to send or the windows are used up."""
        if not self._buffers and (self._control or self._messages):
            self._fill()
        return self._buffers

    def sent(self, count: int) -> None:
        """Take note that `count` bytes of `buffers()` are out."""
        self.sent_bytes += count
        done = 0
        for buffer in self._buffers:
            if count < len(buffer):
                break
            count -= len(buffer)
            done += 1
        del self._buffers[:done]
        if count:
            self._buffers[0] = self._buffers[0][count:]
        if not self._buffers:
            self._settle()

    def copy_unsent(self, done: "asyncio.Future[None]") -> None:
        """Keep a copy of the unsent rest of the message that belongs to `done`: after this its owner may change the buffers.

        Copy this message alone: otherwise, if many are cancelled together, each would be copied as many times as there are.
        """
        for message in self._messages:
            if message.done is done:
                message.parts = deque(memoryview(bytes(part)) for part in message.parts)
        on_their_way = (*self._finished, *itertools.islice(self._messages, 1))
        if any(message.done is done for message in on_their_way):
            self._buffers = [memoryview(bytes(buffer)) for buffer in self._buffers]

    def fail(self, error: Exception) -> None:
        """Nothing more goes out."""
        self._settle(error)
        while self._messages:
            self._finished.append(self._messages.popleft())
        self._settle(error)
        self._buffers.clear()
        self._control.clear()
        self.queued_bytes = 0

    def _settle(self, error: Exception | None = None) -> None:
        for message in self._finished:
            if message.done is not None and not message.done.done():
                if error is None:
                    message.done.set_result(None)
                else:
                    message.done.set_exception(error)
        self._finished.clear()

    def _fill(self) -> None:
        """Cut the next frames: all control frames, then messages up to one batch or one frame."""
        if self._control:
            self._buffers.append(memoryview(bytes(self._control)))
            self._cut_bytes += len(self._control)
            self._control.clear()
        batch = 0
        while self._messages and batch < _BATCH_BYTES and len(self._buffers) < _MAX_BUFFERS:
            message = self._messages[0]
            if message.frame:
                self._buffers.append(memoryview(self._messages.popleft().frame))
                self._cut_bytes += len(message.frame)
                continue
            window = max(0, min(self.stream_window, self.connection_window))  # a window may be negative
            size = min(message.left, self.max_frame_bytes, window)
            if message.left and not size:
                return
            last = size == message.left
            self._buffers.append(memoryview(head(size, Type.DATA, Flags.NONE, self._stream)))
            self._buffers += _take(message.parts, size)
            message.left -= size
            self.stream_window -= size
            self.connection_window -= size
            self.queued_bytes -= size
            self._cut_bytes += HEAD_BYTES + size
            self.data_end = self._cut_bytes
            batch += size
            if last:
                self._finished.append(self._messages.popleft())


def _take(parts: deque[memoryview], size: int) -> list[memoryview]:
    """Remove `size` bytes from the front."""
    taken = []
    while size:
        part = parts.popleft()
        if len(part) > size:
            parts.appendleft(part[size:])
            part = part[:size]
        taken.append(part)
        size -= len(part)
    return taken
