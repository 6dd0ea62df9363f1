"""Cuts the bytes of a connection into frames, and a stream's data into gRPC messages. No I/O.

[Note: in place] Bytes arrive in a small staging buffer, where frame headers and everything small are read. The
rest of a message goes from the kernel directly into the message's own buffer: `room` says where the next bytes belong.
"""

import struct
from collections.abc import Callable
from typing import Protocol

import numpy as np

from shardnet.errors import ProtocolError
from shardnet.transport.http2.frames import HEAD_BYTES, Flags, Type, read_head, unpad

_STAGE_BYTES = 64 * 1024
_MAX_CONTROL_BYTES = 32 * 1024  # of a frame other than DATA
_PADDED, _END_STREAM = int(Flags.PADDED), int(Flags.END_STREAM)  # for tests on each frame: enum members are slow
_PREFIX = struct.Struct(">BI")  # of a gRPC message: compressed or not, length


class FrameTaker(Protocol):
    """The object to which a FrameReader gives what it finds."""

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """A frame other than DATA."""

    def on_data(self, stream: int, flow_bytes: int, *, end: bool) -> None:
        """A DATA frame is over, and its messages were delivered; `flow_bytes` is its size for flow control."""


OnMessage = Callable[[memoryview], None]


class MessageReader:
    """Cuts the data of a stream into gRPC messages. Each gets a buffer of its own, aligned like malloc's."""

    def __init__(self, max_bytes: int, on_message: OnMessage) -> None:
        self.max_bytes = max_bytes
        self.on_message = on_message
        self.count = 0  # messages that were delivered
        self._prefix = bytearray()
        self._message: memoryview | None = None
        self._filled = 0

    @property
    def room(self) -> memoryview | None:
        """The buffer for the rest of the current message; None between messages."""
        return None if self._message is None else self._message[self._filled :]

    def filled(self, count: int) -> None:
        """Take note that `count` bytes were written into `room`."""
        assert self._message is not None
        self._filled += count
        if self._filled == len(self._message):
            message, self._message, self._filled = self._message, None, 0
            self.count += 1
            self.on_message(message)

    def feed(self, data: memoryview) -> None:
        """Take data from another buffer, by copying it."""
        while data:
            if (room := self.room) is None:
                missing = _PREFIX.size - len(self._prefix)
                self._prefix += data[:missing]
                data = data[missing:]
                if len(self._prefix) == _PREFIX.size:
                    self._begin()
            else:
                count = min(len(room), len(data))
                room[:count] = data[:count]
                data = data[count:]
                self.filled(count)

    def _begin(self) -> None:
        compressed, length = _PREFIX.unpack(self._prefix)
        self._prefix.clear()
        if compressed:
            raise ProtocolError("a message is compressed, but no compression was agreed")
        if length > self.max_bytes:
            raise ProtocolError(f"a message of {length} bytes is larger than allowed ({self.max_bytes} bytes)")
        self._message = np.empty(length, np.uint8).data  # not zeroed, as a bytearray would be
        if not length:
            self.filled(0)


class FrameReader:
    """Cuts incoming bytes into frames: see [Note: in place]."""

    def __init__(self, stream: int, messages: MessageReader, taker: FrameTaker, max_frame_bytes: int) -> None:
        self._stream = stream
        self._messages = messages
        self._taker = taker
        self._max_frame_bytes = max_frame_bytes
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._start = self._end = 0  # of the bytes that are staged and not read yet
        self._data_left = 0  # bytes of the current DATA frame that are still to come
        self._data_bytes = 0  # its whole length
        self._data_ends = False
        self._direct = False  # the last `room` was the message's own buffer, not the stage

    @property
    def room(self) -> memoryview:
        """The buffer for the next bytes from the connection."""
        room = self._messages.room if self._data_left and self._start == self._end else None
        self._direct = room is not None and len(room) > 0
        if room is not None and self._direct:
            return room[: self._data_left]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._end == len(self._stage):
            rest = self._end - self._start
            self._stage[:rest] = bytes(self._stage[self._start : self._end])
            self._start, self._end = 0, rest
        return self._stage[self._end :]

    @property
    def expected_bytes(self) -> int:
        """How many more bytes must come in any case before anything is complete."""
        room = self._messages.room if self._data_left and self._start == self._end else None
        return 1 if room is None else max(1, min(len(room), self._data_left))

    def filled(self, count: int) -> None:
        """Take note that `count` bytes were written into `room`, and call the takers. Raises ProtocolError."""
        if self._direct:
            self._data_left -= count
            self._messages.filled(count)
            self._end_data()
            return
        self._end += count
        while self._start < self._end and self._read_one():
            pass

    def _read_one(self) -> bool:
        """Take one step through the stage; returns False if more bytes must come first."""
        staged = self._end - self._start
        if self._data_left:
            count = min(staged, self._data_left)
            data = self._stage[self._start : self._start + count]
            self._start += count
            self._data_left -= count
            self._messages.feed(data)
            self._end_data()
            return True
        if staged < HEAD_BYTES:
            return False
        length, kind, flags, stream = read_head(self._stage, self._start)
        if kind == Type.DATA and not flags & _PADDED and stream == self._stream:
            self._begin_data(length, flags)
            return True
        if length > (_MAX_CONTROL_BYTES if kind != Type.DATA else _STAGE_BYTES - HEAD_BYTES):
            raise ProtocolError(f"a frame of type {kind} is too long: it has {length} bytes")
        if staged < HEAD_BYTES + length:
            return False
        self._start += HEAD_BYTES + length
        self._take_whole(kind, flags, stream, bytes(self._stage[self._start - length : self._start]))
        return True

    def _begin_data(self, length: int, flags: int) -> None:
        if length > self._max_frame_bytes:
            raise ProtocolError(f"a DATA frame has {length} bytes, more than was agreed")
        self._start += HEAD_BYTES
        self._data_left = self._data_bytes = length
        self._data_ends = bool(flags & _END_STREAM)
        self._end_data()

    def _end_data(self) -> None:
        if not self._data_left:
            self._taker.on_data(self._stream, self._data_bytes, end=self._data_ends)

    def _take_whole(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind != Type.DATA:
            self._taker.on_frame(kind, flags, stream, payload)
            return
        if stream == self._stream:
            self._messages.feed(memoryview(unpad(payload, flags)))
        self._taker.on_data(stream, len(payload), end=bool(flags & Flags.END_STREAM))
