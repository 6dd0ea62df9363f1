"""Outgoing bytes: the same messages whatever the peer allows, never more than it allows, and unchanged."""

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import ProtocolError
from shardnet.transport.http2.frames import DEFAULT_WINDOW, HEAD_BYTES, MAX_WINDOW, Flags, Type, frame, read_head
from shardnet.transport.http2.writing import FrameWriter

STREAM = 1


def drain(writer: FrameWriter, count: int = 1 << 30) -> bytes:
    """What a socket takes that accepts so many bytes a time."""
    out = bytearray()
    while buffers := writer.buffers():
        piece = b"".join(buffers)[:count]
        out += piece
        writer.sent(len(piece))
    return bytes(out)


def frames_of(wire: bytes) -> list[tuple[int, int, bytes]]:
    found, at = [], 0
    while at < len(wire):
        length, kind, flags, _ = read_head(wire, at)
        at += HEAD_BYTES
        found.append((kind, flags, wire[at : at + length]))
        at += length
    return found


def data_of(wire: bytes) -> bytes:
    return b"".join(payload for kind, _, payload in frames_of(wire) if kind == Type.DATA)


def put(writer: FrameWriter, *parts: bytes) -> None:
    writer.message([memoryview(part) for part in parts], None)


@given(
    messages=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), min_size=1, max_size=8),
    windows=st.lists(st.integers(1, 2000), min_size=1, max_size=5),
    count=st.integers(1, 5000),
)
def test_windows_are_kept_and_nothing_is_lost(messages: list[list[bytes]], windows: list[int], count: int) -> None:
    writer = FrameWriter(STREAM)
    writer.set_initial_window(0)
    for message in messages:
        put(writer, *message)
    total, out, allowed = b"".join(itertools.chain(*messages)), b"", 0
    for window in itertools.cycle(windows):
        out += drain(writer, count)
        assert len(data_of(out)) <= allowed
        if len(data_of(out)) == len(total):
            break
        writer.widen(STREAM, window)
        allowed += window
    assert data_of(out) == total
    assert writer.queued_bytes == 0


def test_frames_are_no_larger_than_the_peer_takes() -> None:
    writer = FrameWriter(STREAM)
    put(writer, bytes(40_000))
    assert [len(payload) for _, _, payload in frames_of(drain(writer))] == [16384, 16384, 7232]
    writer.widen(0, 10**6)
    writer.widen(STREAM, 10**6)
    writer.set_max_frame(10**6)
    put(writer, bytes(400_000))
    assert [len(payload) for _, _, payload in frames_of(drain(writer))] == [400_000]


def test_both_windows_count() -> None:
    writer = FrameWriter(STREAM)
    put(writer, bytes(100_000))
    assert len(data_of(drain(writer))) == DEFAULT_WINDOW
    writer.widen(STREAM, 50_000)
    assert drain(writer) == b""
    writer.widen(0, 10_000)
    assert len(data_of(drain(writer))) == 10_000
    writer.widen(7, 10**6)  # a stream that is not ours
    assert drain(writer) == b""


def test_a_smaller_initial_window_takes_back_what_was_given() -> None:
    """RFC 9113, section 6.9.2: the window may become negative."""
    writer = FrameWriter(STREAM)
    put(writer, bytes(60_000))
    drain(writer)
    writer.set_initial_window(50_000)
    assert writer.stream_window == -10_000
    put(writer, b"x")
    assert drain(writer) == b""
    writer.widen(STREAM, 10_001)
    assert data_of(drain(writer)) == b"x"


def test_control_frames_go_between_frames() -> None:
    writer, ping = FrameWriter(STREAM), frame(Type.PING, Flags.NONE, 0, b"01234567")
    writer.set_initial_window(10**6)
    writer.widen(0, 10**6)
    put(writer, b"a" * 100_000)
    first = b"".join(writer.buffers())[:50_000]
    writer.sent(len(first))
    writer.control(ping)
    put(writer, b"b")
    found = frames_of(first + drain(writer))
    assert [kind for kind, _, _ in found].count(Type.PING) == 1
    assert b"".join(payload for kind, _, payload in found if kind == Type.DATA) == b"a" * 100_000 + b"b"


def test_the_end_comes_last() -> None:
    writer = FrameWriter(STREAM)
    put(writer, b"last words")
    writer.end()
    assert frames_of(drain(writer)) == [(Type.DATA, Flags.NONE, b"last words"), (Type.DATA, Flags.END_STREAM, b"")]


def test_trailers_do_not_overtake_what_they_follow() -> None:
    """If the socket is full both wait, and control frames go first."""
    writer, trailers = FrameWriter(STREAM), frame(Type.HEADERS, Flags.END_STREAM | Flags.END_HEADERS, STREAM, b"\x88")
    put(writer, b"result")
    writer.behind(trailers)
    writer.control(frame(Type.PING, Flags.NONE, 0, bytes(8)))
    assert [kind for kind, _, _ in frames_of(drain(writer))] == [Type.PING, Type.DATA, Type.HEADERS]
    assert writer.unsent_bytes == 0


async def test_done_means_out() -> None:
    writer = FrameWriter(STREAM)
    done = [asyncio.get_running_loop().create_future() for _ in range(3)]
    for future in done:
        writer.message([memoryview(bytes(40_000))], future)
    while (window := writer.connection_window) and (buffers := writer.buffers()):
        writer.sent(sum(map(len, buffers)))
        assert window >= writer.connection_window
    assert [future.done() for future in done] == [True, False, False]
    writer.fail(ConnectionError())
    assert [type(future.exception()) for future in done[1:]] == [ConnectionError] * 2
    assert writer.buffers() == []


async def test_what_was_copied_may_change() -> None:
    """The data that cancelled senders lent: some of it is on its way, some not."""
    writer, lent = FrameWriter(STREAM), [bytearray(b"a" * 30_000), bytearray(b"b" * 30_000)]
    done = [asyncio.get_running_loop().create_future() for _ in lent]
    for buffer, future in zip(lent, done, strict=True):
        writer.message([memoryview(buffer)], future)
    out = b"".join(writer.buffers())[:20_000]
    writer.sent(len(out))
    for future in done:
        writer.copy_unsent(future)
    for buffer in lent:
        buffer[:] = bytes(len(buffer))
    assert data_of(out + drain(writer)) == b"a" * 30_000 + b"b" * 30_000


async def test_of_many_that_are_cancelled_each_is_copied_once() -> None:
    """A failed collective cancels its sends one by one: to copy the whole queue for each took a second for 64 of 2 MiB."""
    writer, size = FrameWriter(STREAM), 100_000
    done = [asyncio.get_running_loop().create_future() for _ in range(64)]
    for future in done:
        writer.message([memoryview(bytes(size))], future)
    writer.sent(len(b"".join(writer.buffers())) // 2)  # the first is on its way
    untouched = writer._messages[-1].parts[0].obj
    for future in done[:-1]:
        writer.copy_unsent(future)
    assert writer._messages[-1].parts[0].obj is untouched
    copies = [message.parts[0].obj for message in writer._messages]
    writer.copy_unsent(done[-1])
    assert [message.parts[0].obj is copy for message, copy in zip(writer._messages, copies, strict=True)] == [True] * 63 + [False]


@pytest.mark.parametrize("message", [b"", b"x"])
def test_an_end_does_not_need_a_window(message: bytes) -> None:
    """It can be sent even if the window is below zero: an empty frame uses nothing of it."""
    writer = FrameWriter(STREAM)
    put(writer, bytes(60_000))
    drain(writer)
    writer.set_initial_window(50_000)
    if message:
        put(writer, message)
    writer.end()
    assert frames_of(drain(writer)) == ([] if message else [(Type.DATA, Flags.END_STREAM, b"")])
    writer.widen(STREAM, 10_001)
    assert data_of(drain(writer)) == message


def test_a_peer_that_asks_and_does_not_read() -> None:
    """Each PING must be answered; without a bound the answers would fill the memory."""
    writer = FrameWriter(STREAM)
    with pytest.raises(ProtocolError, match="does not read"):
        answer(writer, 20_000)


def answer(writer: FrameWriter, count: int) -> None:
    for _ in range(count):
        writer.control(frame(Type.PING, Flags.ACK, 0, bytes(8)))


@pytest.mark.parametrize("increment", [0, MAX_WINDOW])
def test_a_window_that_cannot_be(increment: int) -> None:
    with pytest.raises(ProtocolError, match="a WINDOW_UPDATE frame adds"):
        FrameWriter(STREAM).widen(0, increment)


@pytest.mark.parametrize("size", [0, 16383, 1 << 24])
def test_a_frame_size_that_cannot_be(size: int) -> None:
    with pytest.raises(ProtocolError, match="a maximum frame size"):
        FrameWriter(STREAM).set_max_frame(size)


def test_an_initial_window_that_cannot_be() -> None:
    with pytest.raises(ProtocolError, match="an initial window"):
        FrameWriter(STREAM).set_initial_window(MAX_WINDOW + 1)
