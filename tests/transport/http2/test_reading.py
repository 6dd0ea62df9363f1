"""Incoming bytes give the same frames and messages however they are cut; and bytes that no peer may send."""

import itertools
import struct
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import ProtocolError
from shardnet.transport.http2.frames import DEFAULT_FRAME_BYTES, Flags, Type, frame, head
from shardnet.transport.http2.reading import FrameReader, MessageReader

STREAM = 1
MAX_MESSAGE = 300_000


class Notes:
    """Records what a reader finds."""

    def __init__(self, max_frame_bytes: int = 200_000) -> None:
        self.messages: list[bytes] = []
        self.frames: list[tuple[int, int, bytes]] = []
        self.flow_bytes = 0
        self.ends = 0
        messages = MessageReader(MAX_MESSAGE, lambda message: self.messages.append(bytes(message)))
        self.reader = FrameReader(STREAM, messages, self, max_frame_bytes)

    def on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.frames.append((kind, stream, payload))

    def on_data(self, stream: int, flow_bytes: int, *, end: bool) -> None:
        self.flow_bytes += flow_bytes
        self.ends += end

    def read(self, data: bytes, sizes: Iterable[int] = (1 << 30,)) -> "Notes":
        """As if a socket gave at most so many bytes a time."""
        rest, sizes = memoryview(data), itertools.cycle(sizes)
        while rest:
            room = self.reader.room
            count = min(len(room), len(rest), next(sizes))
            assert count
            room[:count] = rest[:count]
            rest = rest[count:]
            self.reader.filled(count)
        return self


def prefixed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


def data_frames(stream: bytes, cuts: Iterable[int]) -> bytes:
    """The stream as DATA frames that end at these places."""
    places = sorted({*(cut % (len(stream) + 1) for cut in cuts), len(stream)})
    begins = [0, *places]
    return b"".join(frame(Type.DATA, Flags.NONE, STREAM, stream[a:b]) for a, b in zip(begins, places, strict=False))


@given(
    messages=st.lists(st.binary(max_size=400) | st.integers(0, 150_000).map(lambda size: size.to_bytes(3) * (size // 3)), max_size=5),
    cuts=st.lists(st.integers(0, 300_000), max_size=6),
    sizes=st.lists(st.integers(1, 100_000), min_size=1, max_size=5),
)
def test_messages_do_not_depend_on_frames_or_reads(messages: list[bytes], cuts: list[int], sizes: list[int]) -> None:
    stream = b"".join(map(prefixed, messages))
    frames = data_frames(stream, cuts)
    notes = Notes(max_frame_bytes=1 << 20).read(
        frames + frame(Type.PING, 0, 0, b"12345678"), [max(size, len(frames) // 300) for size in sizes]
    )
    assert notes.messages == messages
    assert notes.flow_bytes == len(stream)
    assert notes.frames == [(Type.PING, 0, b"12345678")]


def test_byte_by_byte() -> None:
    wire = frame(Type.SETTINGS, 0, 0, bytes(12)) + data_frames(prefixed(b"") + prefixed(b"abc") + prefixed(bytes(50)), [3, 9])
    notes = Notes().read(wire, [1])
    assert notes.messages == [b"", b"abc", bytes(50)]
    assert notes.frames == [(Type.SETTINGS, 0, bytes(12))]


def test_the_rest_of_a_large_message_goes_where_it_belongs() -> None:
    """It is read into the message's own buffer, and the message is made of that without a copy."""
    seen: list[memoryview] = []
    notes = Notes()
    notes.reader._messages.on_message = seen.append
    message = bytes(range(256)) * 512
    wire = data_frames(prefixed(message), [])
    notes.read(wire[:30])
    room = notes.reader.room
    assert len(room) == len(wire) - 30
    room[:] = wire[30:]
    notes.reader.filled(len(room))
    assert seen == [message]
    assert seen[0].obj is room.obj


def test_padded_data_counts_whole_for_flow_control() -> None:
    padded = bytes([7]) + prefixed(b"hello") + bytes(7)
    notes = Notes().read(frame(Type.DATA, Flags.PADDED | Flags.END_STREAM, STREAM, padded))
    assert (notes.messages, notes.flow_bytes, notes.ends) == ([b"hello"], len(padded), 1)


def test_an_empty_frame_ends_a_stream() -> None:
    notes = Notes().read(data_frames(prefixed(b"x"), []) + frame(Type.DATA, Flags.END_STREAM, STREAM))
    assert (notes.messages, notes.ends) == ([b"x"], 1)


def test_data_of_another_stream_is_counted_and_dropped() -> None:
    notes = Notes().read(frame(Type.DATA, Flags.NONE, 3, prefixed(b"stray")))
    assert (notes.messages, notes.flow_bytes) == ([], 10)


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (frame(Type.DATA, 0, STREAM, b"\1" + bytes(4)), "compressed"),
        (frame(Type.DATA, 0, STREAM, b"\0" + struct.pack(">I", MAX_MESSAGE + 1)), "larger than allowed"),
        (frame(Type.DATA, 0, STREAM, b"\0\xff\xff\xff\xff"), "larger than allowed"),
        (head(200_001, Type.DATA, 0, STREAM), "more than was agreed"),
        (head(100_000, Type.HEADERS, 0, STREAM), "frame of type 1 is too long: it has 100000 bytes"),
        (head(2**24 - 1, 0xEE, 0, 5), "frame of type 238"),
        (frame(Type.DATA, Flags.PADDED, STREAM, b""), "padded frame is empty"),
        (frame(Type.DATA, Flags.PADDED, STREAM, b"\x09abc"), "padding .* longer"),
    ],
)
def test_what_no_peer_may_send(wire: bytes, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        Notes().read(wire)


@given(st.binary(max_size=2000), st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_noise_is_read_or_refused(noise: bytes, sizes: list[int]) -> None:
    """Never another error, and never memory for more than a message."""
    try:
        Notes(DEFAULT_FRAME_BYTES).read(noise, sizes)
    except ProtocolError:
        return
