"""A mesh inside one process whose pipes are slow at random, but repeatably so: a seed is a schedule.

Chunks of one pipe stay in order, as everywhere; chunks of different pipes overtake each other as they never would
between idle processes. This shows race conditions.
"""

import asyncio
import random

from shardnet.transport.memory import MemoryMesh
from shardnet.wire import Chunk

MAX_TURNS = 12  # of the event loop, for which one chunk waits


class JitterMesh(MemoryMesh):
    """One rank's end; `connect` makes it, then it is given a seed."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.random = random.Random(0)
        self._pipes = [asyncio.Lock() for _ in range(world_size)]  # first come, first served

    async def send(self, peer: int, chunk: Chunk) -> None:
        async with self._pipes[peer]:
            for _ in range(self.random.randrange(MAX_TURNS)):
                await asyncio.sleep(0)
            await super().send(peer, chunk)
