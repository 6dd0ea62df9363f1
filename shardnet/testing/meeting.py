"""`Meeting`: the rendezvous of a test's cluster."""

import asyncio
from types import TracebackType
from typing import Self

from shardnet.config import Timeouts
from shardnet.loop import LoopThread
from shardnet.rendezvous.client import status
from shardnet.rendezvous.server import RendezvousServer

SETTLE_S = 0.3
LOOK_EVERY_S = 0.02


class Meeting:
    """On the process's loop thread, for callers on any other one; a context manager."""

    def __init__(self, world_size: int) -> None:
        """`world_size` is the world size of the first epoch."""
        self._loop = LoopThread.shared()
        self._server = RendezvousServer("127.0.0.1:0", timeouts=Timeouts.for_tests(), settle_s=SETTLE_S, first_world_size=world_size)

    @property
    def address(self) -> str:
        return self._server.address

    def somebody_waits(self, within_s: float) -> bool:
        """Wait until a worker waits for the next epoch, at most `within_s`; returns whether one does."""

        async def look() -> bool:
            try:
                async with asyncio.timeout(within_s):
                    while all(job.joined <= len(job.members) for job in await status(self.address)):  # noqa: ASYNC110 - it tells its members, and nobody who looks on
                        await asyncio.sleep(LOOK_EVERY_S)
            except TimeoutError:
                return False
            return True

        return self._loop.run(look()).result()

    def __enter__(self) -> Self:
        self._loop.run(self._server.start()).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._loop.run(self._server.aclose()).result()
