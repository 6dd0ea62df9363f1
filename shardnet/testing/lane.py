"""`Lane`: one direction of a relay, for all connections that go through it."""

import asyncio
import random

from shardnet.testing.conditions import Conditions, Way
from shardnet.testing.harm import Harm


class Lane:
    """Says for each block when it may pass, and in what form. Lives as long as its relay."""

    def __init__(self, way: Way, rng: random.Random) -> None:
        self.way = way
        self._conditions = Conditions()
        self.passed_bytes = 0
        self.harms: list[Harm] = []
        self._random = rng
        self._open = asyncio.Event()
        self._open.set()
        self._free_s = 0.0  # when the link will have sent all that it was given

    @property
    def conditions(self) -> Conditions:
        return self._conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        self._conditions, self._free_s = conditions, 0.0

    def due_s(self, size: int) -> float:
        """The time, by the loop's clock, when `size` bytes that have come now are through."""
        now_s = asyncio.get_running_loop().time()
        conditions = self.conditions
        self._free_s = max(now_s, self._free_s)
        if conditions.bytes_per_s:
            self._free_s += size / conditions.bytes_per_s
        return self._free_s + conditions.latency_s + self._random.uniform(0.0, conditions.jitter_s)

    def pieces(self, block: bytes) -> list[bytes]:
        """The segments in which a block passes, after any harm to it."""
        harm = next((each for each in self.harms if each.fits(block)), None)
        if harm is not None:
            block = harm.done_to(block)
        size = self.conditions.slice_bytes or len(block)
        return [block[start : start + size] for start in range(0, len(block), size)] if block else []

    def hold(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def passable(self) -> None:
        """Wait until the lane is not held."""
        await self._open.wait()
