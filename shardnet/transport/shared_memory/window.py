"""`Window`: the memory that this rank writes and its node's other ranks read."""

import asyncio
import mmap
import os
import secrets
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory.lending import Secret
from shardnet.transport.shared_memory.memfd import allocate, keep_others_from_writing
from shardnet.wire import Buffer

NAME = "shardnet-window"
HEADER_BYTES = mmap.PAGESIZE  # the secret, then nothing
SECRET_BYTES = 32
PATIENCE_S = 0.5  # to wait for readers, who normally release within milliseconds
_ALIGNMENT = 64  # of pieces: a cache line, and more than any element needs


@dataclass(slots=True)
class Piece:
    """Data that lies in the window until all `readers` have released it. Positions count from the first byte ever written."""

    start: int
    end: int
    readers: set[int]


class Window:
    """A ring of `capacity` bytes. Runs on the loop thread.

    Readers release pieces in any order, but the window reuses their room in the order in which they were put. So a reader must
    release each piece soon, whatever else it waits for.
    """

    def __init__(self, capacity: int, on_full: Callable[[Collection[int]], None]) -> None:
        """`on_full` gets the ranks that hold the oldest piece while a `put` waits for room. Raises OSError if there is no memory."""
        self.capacity = capacity + -capacity % _ALIGNMENT
        self._on_full = on_full
        self._secret = Secret(secrets.token_bytes(SECRET_BYTES))
        self._head = 0  # where the next piece may start
        self._pieces: deque[Piece] = deque()  # not released, by position
        self._room = asyncio.Event()
        self._stuck = False  # a put has waited in vain for room since the last time that room became free
        self._over = False  # nothing is put any more
        self._descriptor = allocate(NAME, HEADER_BYTES + self.capacity)
        try:
            self._map = mmap.mmap(self._descriptor, HEADER_BYTES + self.capacity)
            keep_others_from_writing(self._descriptor)
        except BaseException:
            self.hide()
            raise
        self._map[:SECRET_BYTES] = self._secret.content
        self._data = np.frombuffer(self._map, np.uint8, self.capacity, HEADER_BYTES)

    def offer(self) -> mesh_pb2.WindowOffer:
        """Tell where a reader finds the window, until `hide`."""
        return mesh_pb2.WindowOffer(
            pid=os.getpid(),
            descriptor=self._descriptor,
            capacity=self.capacity,
            secret=self._secret.content,
            secret_address=self._secret.address,
        )

    def hide(self) -> None:
        """Close the descriptor: every reader has found it, or never will."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def put(self, data: Buffer, readers: Collection[int]) -> Piece | None:
        """Copy data in. It stays until each reader has released it or left. One call at a time. Returns None if no room becomes
        free within a short time, because a frozen reader must not hold up the others."""
        size = len(data)
        start = self._place(size)
        while not self._over and self._pieces and start + size - self._pieces[0].start > self.capacity:
            if self._stuck:
                return None
            self._on_full(self._pieces[0].readers)
            self._room.clear()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._room.wait()
            except TimeoutError:
                self._stuck = True
        if self._over or size > self.capacity:
            return None
        np.copyto(self._data[start % self.capacity :][:size], np.frombuffer(data, np.uint8))  # lets other threads run
        piece = Piece(start, start + size, set(readers))
        self._pieces.append(piece)
        self._head = piece.end
        return piece

    def release(self, reader: int, position: int) -> None:
        """The reader no longer needs any piece that ends at `position` or before."""
        for piece in self._pieces:
            if piece.end > position:
                break
            piece.readers.discard(reader)
        self._reclaim()

    def withdraw(self, piece: Piece, readers: Collection[int]) -> None:
        """These readers will never hear of it."""
        piece.readers.difference_update(readers)
        self._reclaim()

    def leave(self, reader: int) -> None:
        """The reader has said goodbye: it needs nothing any more."""
        self.release(reader, self._head)

    def lose(self, reader: int) -> None:
        """The reader is lost. If it was only frozen, it may not know that when it runs again, and could finish a collective with
        pieces that it was told of before. So those are never overwritten: if there are any, the window takes no more data."""
        if any(reader in piece.readers for piece in self._pieces):
            self._end()

    def close(self) -> None:
        """Take no more data. Readers keep what they have mapped."""
        self.hide()
        self._end()
        self._data = np.empty(0, np.uint8)
        self._map.close()

    def _end(self) -> None:
        self._over = True
        self._room.set()  # a put that waits for room must not wait any longer

    def _place(self, size: int) -> int:
        """The next position at which `size` bytes fit without wrapping around the end of the ring."""
        start = self._head + -self._head % _ALIGNMENT
        if start % self.capacity + size > self.capacity:
            start += -start % self.capacity
        return start

    def _reclaim(self) -> None:
        while self._pieces and not self._pieces[0].readers:
            self._pieces.popleft()
            self._stuck = False
            self._room.set()
