"""The ring of bytes itself: where pieces are, for how long, and which readers are asked for room."""

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardnet.errors import ProtocolError
from shardnet.pb.mesh_pb2 import WindowPiece
from shardnet.transport.shared_memory.view import View
from shardnet.transport.shared_memory.window import PATIENCE_S, Piece, Window

CAPACITY = 1024


class Pair:
    """A window and two readers of it in the same process."""

    def __init__(self) -> None:
        self.asked: list[set[int]] = []
        self.window = Window(CAPACITY, lambda holders: self.asked.append(set(holders)))
        self.views = {reader: View(self.window.offer()) for reader in (1, 2)}

    async def put(self, data: bytes, *readers: int) -> Piece:
        async with asyncio.timeout(5):
            piece = await self.window.put(data, readers)
        assert piece is not None
        return piece

    def read(self, reader: int, piece: Piece) -> bytes:
        place = WindowPiece(position=piece.start, size=piece.end - piece.start)
        data = bytes(self.views[reader].read(place))
        self.views[reader].take(place)
        return data


@contextmanager
def window() -> Iterator[Pair]:
    pair = Pair()
    try:
        yield pair
    finally:
        pair.window.close()
        for view in pair.views.values():
            view.close()


async def test_every_reader_sees_what_was_put() -> None:
    with window() as pair:
        first, second = await pair.put(b"for both", 1, 2), await pair.put(bytes(range(200)), 2)
        assert pair.read(1, first) == pair.read(2, first) == b"for both"
        assert pair.read(2, second) == bytes(range(200))


async def test_pieces_lie_at_cache_lines_and_in_one_piece() -> None:
    with window() as pair:
        pieces = []
        for size in (1, 100, 500, 400, 64, 512, 512):
            piece = await pair.put(bytes([size % 251]) * size, 1)
            assert piece.start % 64 == 0
            assert piece.start % CAPACITY + size <= CAPACITY
            assert pair.read(1, piece) == bytes([size % 251]) * size
            pair.window.release(1, piece.end)
            pieces.append(piece)
        assert pieces[3].start == CAPACITY, "400 bytes do not fit behind the 500: the next lap"


async def test_room_comes_back_when_every_reader_has_released() -> None:
    """Room comes back in the order of the pieces, whichever reader is first; the readers that hold the oldest piece are asked."""
    with window() as pair:
        old, new = await pair.put(bytes(512), 1, 2), await pair.put(bytes(512), 2)
        waiting = asyncio.ensure_future(pair.put(b"next", 1))
        await asyncio.sleep(0)
        assert pair.asked == [{1, 2}]
        pair.window.release(2, new.end)  # the old one, too
        await asyncio.sleep(0)
        assert not waiting.done()
        pair.window.release(1, old.end)
        assert (await waiting).start == 2 * 512


async def test_a_released_piece_behind_a_held_one_is_not_overwritten_out_of_turn() -> None:
    with window() as pair:
        held = await pair.put(b"h" * 512, 1)
        later = await pair.put(b"l" * 512, 2)
        pair.window.release(2, later.end)
        waiting = asyncio.ensure_future(pair.put(b"n" * 512, 2))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert pair.read(1, held) == b"h" * 512
        pair.window.release(1, held.end)
        await waiting


@pytest.mark.parametrize("how", ["leave", "withdraw", "lose", "close"])
async def test_nobody_waits_for_a_reader_that_will_not_read(how: str) -> None:
    with window() as pair:
        piece = await pair.put(bytes(512), 1)
        await pair.put(bytes(512), 1)
        waiting = asyncio.ensure_future(pair.window.put(bytes(512), [2]))
        await asyncio.sleep(0)
        assert not waiting.done()
        match how:
            case "leave":
                pair.window.leave(1)
            case "lose":
                pair.window.lose(1)
            case "withdraw":
                pair.window.withdraw(piece, [1])
            case "close":
                pair.window.close()
        begin = time.monotonic()
        put = await asyncio.wait_for(waiting, 5)
        assert (put is not None) == (how in ("leave", "withdraw"))
        assert time.monotonic() - begin < PATIENCE_S / 2


async def test_what_a_lost_reader_was_told_of_is_never_overwritten() -> None:
    """The reader may only have been frozen, and read it when it thaws."""
    with window() as pair:
        told = await pair.put(b"t" * 128, 1)
        pair.window.lose(1)
        for _ in range(20):
            if (piece := await pair.window.put(bytes(128), [2])) is not None:
                pair.window.release(2, piece.end)
        assert pair.read(1, told) == b"t" * 128


async def test_a_lost_reader_that_holds_nothing_changes_nothing() -> None:
    with window() as pair:
        told = await pair.put(bytes(512), 1)
        pair.window.release(1, told.end)
        pair.window.lose(1)
        for _ in range(4):
            pair.window.release(2, (await pair.put(bytes(512), 2)).end)


@pytest.mark.parametrize(("capacity", "size"), [(100, 50), (1000, 500), (1024, 1000)])
async def test_a_window_of_any_size_takes_pieces_up_to_that(capacity: int, size: int) -> None:
    """It does so wherever the last piece ended, even though pieces begin at cache lines."""
    made = Window(capacity, lambda _: None)
    try:
        for number in range(50):
            piece = await made.put(bytes(max(1, size - number)), [1])
            assert piece is not None
            assert piece.start % made.capacity % 64 == 0
            made.release(1, piece.end)
        assert await made.put(bytes(made.capacity + 1), [1]) is None
    finally:
        made.close()


async def test_a_reader_that_keeps_everything_is_given_up_once() -> None:
    with window() as pair:
        old = await pair.put(bytes(512), 1)
        await pair.put(bytes(512), 2)
        begin = time.monotonic()
        assert await pair.window.put(bytes(8), [2]) is None
        assert time.monotonic() - begin >= PATIENCE_S
        pair.asked.clear()
        assert await pair.window.put(bytes(8), [2]) is None
        assert pair.asked == [], "nobody is asked, or waited for, again"
        pair.window.release(1, old.end)
        await pair.put(bytes(8), 2)


async def test_readers_report_before_the_window_is_full() -> None:
    with window() as pair:
        reports = 0
        for _ in range(64):
            piece = await pair.put(bytes(128), 1)
            place = WindowPiece(position=piece.start, size=128)
            if pair.views[1].take(place):
                pair.window.release(1, pair.views[1].report().position)
                reports += 1
        assert pair.asked == []
        assert reports == 64 * 128 // (CAPACITY // 4)


@pytest.mark.parametrize(("position", "size"), [(0, 0), (CAPACITY - 8, 16), (0, CAPACITY + 1), (2**64 - 64, 64)])
async def test_what_is_no_piece_is_refused(position: int, size: int) -> None:
    with window() as pair, pytest.raises(ProtocolError, match="not a valid piece of a window"):
        pair.views[1].read(WindowPiece(position=position, size=size))


async def test_a_piece_that_was_read_is_not_read_again() -> None:
    """It may have been released, and overwritten, by then."""
    with window() as pair:
        piece = await pair.put(bytes(64), 1)
        pair.read(1, piece)
        with pytest.raises(ProtocolError):
            pair.read(1, piece)


async def test_a_reader_cannot_write() -> None:
    with window() as pair:
        piece = await pair.put(bytes(64), 1)
        with pytest.raises(TypeError, match="read-only"):
            pair.views[1].read(WindowPiece(position=piece.start, size=64))[0] = 1
        descriptor = os.open(f"/proc/self/fd/{pair.window.offer().descriptor}", os.O_RDWR)
        try:
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)  # a reader would get a SIGBUS
            with pytest.raises(PermissionError):
                os.write(descriptor, b"x")
        finally:
            os.close(descriptor)


async def test_the_memory_of_another_process_is_not_touched() -> None:
    """The process number may mean another process here, as in another container."""
    with window() as pair, tempfile.TemporaryFile() as mine:
        offer = pair.window.offer()
        for field, value in (("descriptor", mine.fileno()), ("secret", bytes(32)), ("capacity", 2 * CAPACITY), ("pid", 2**22 + 1)):
            other = type(offer)()
            other.CopyFrom(offer)
            setattr(other, field, value)
            with pytest.raises(OSError, match=r"another container|not what was offered"):
                View(other)


async def test_a_file_that_is_called_like_a_window_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe without a writer would block for ever."""
    pipe = tmp_path / "shardnet-window"
    os.mkfifo(pipe)
    with window() as pair:
        offer = pair.window.offer()
        descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        try:
            offer.descriptor = descriptor
            with pytest.raises(OSError, match="another container"):
                await asyncio.wait_for(asyncio.to_thread(View, offer), 5)
        finally:
            os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # releases a reader that opened it
            os.close(descriptor)


async def test_a_window_of_no_bytes_is_refused() -> None:
    """No position lies in it."""
    nothing = Window(0, lambda _: None)
    try:
        with pytest.raises(OSError, match="a window of 0 bytes"):
            View(nothing.offer())
    finally:
        nothing.close()
