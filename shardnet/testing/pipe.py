"""`Pipe`: one direction of one connection through a relay."""

import asyncio
from collections import deque

from shardnet.testing.lane import Lane

BLOCK_BYTES = 64 * 1024
QUEUED_BYTES = 1024 * 1024  # under way at most, as much as 20 ms at 400 Mbit/s; a sender of more waits, as before a full switch


class Pipe:
    """Reads at one end, and writes at the other as the lane allows; for one call of `carry`."""

    def __init__(self, lane: Lane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._lane = lane
        self._reader = reader
        self._writer = writer
        self._queue: deque[tuple[float, bytes]] = deque()
        self._queued_bytes = 0
        self._changed = asyncio.Condition()

    async def carry(self) -> None:
        """Carry bytes until the input ends, and pass the end on. Raises a group of OSErrors if either end breaks."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._read())
            group.create_task(self._write())

    async def _read(self) -> None:
        while block := await self._reader.read(BLOCK_BYTES):
            for piece in self._lane.pieces(block):
                await self._put(piece)
        await self._put(b"")

    async def _write(self) -> None:
        while True:
            due_s, piece = await self._get()
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            await self._lane.passable()
            try:
                if not piece:
                    self._writer.write_eof()
                    return
                self._writer.write(piece)
                await self._writer.drain()
            except RuntimeError as error:  # how uvloop says it
                raise ConnectionResetError("the connection is closed") from error
            self._lane.passed_bytes += len(piece)

    async def _put(self, piece: bytes) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._queue or self._queued_bytes + len(piece) <= QUEUED_BYTES)
            self._queue.append((self._lane.due_s(len(piece)), piece))
            self._queued_bytes += len(piece)
            self._changed.notify_all()

    async def _get(self) -> tuple[float, bytes]:
        async with self._changed:
            await self._changed.wait_for(lambda: self._queue)
            due_s, piece = self._queue.popleft()
            self._queued_bytes -= len(piece)
            self._changed.notify_all()
            return due_s, piece
