"""Workers that really join, for the tests of the rendezvous over gRPC."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardnet.config import Timeouts
from shardnet.rendezvous.client import Membership, join
from shardnet.rendezvous.events import Waiting
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.server import RendezvousServer

TIMEOUTS = Timeouts.for_tests()
SETTLE_S = 0.2


def rendezvous(listen: str = "127.0.0.1:0", settle_s: float = SETTLE_S) -> RendezvousServer:
    return RendezvousServer(listen, timeouts=TIMEOUTS, settle_s=settle_s)


class Person:
    """A worker that joins in a task of its own, records what it is told, and stays until it is told to go."""

    def __init__(self, address: str, request: JoinRequest, timeouts: Timeouts = TIMEOUTS) -> None:
        self.waiting: asyncio.Queue[Waiting] = asyncio.Queue()
        self.lost: asyncio.Queue[tuple[int, str, bool]] = asyncio.Queue()
        self.joined: asyncio.Future[Membership] = asyncio.get_running_loop().create_future()
        self.arrived = asyncio.Event()  # the rendezvous has answered it, even if with a refusal
        self.joined.add_done_callback(lambda _: self.arrived.set())
        self._membership = join(address, request, timeouts=timeouts, on_waiting=self._on_waiting, on_lost=self._on_lost)
        self._may_go = asyncio.Event()
        self._task = asyncio.create_task(self._live(), name=f"person {request.incarnation}")

    async def _live(self) -> None:
        try:
            async with self._membership as membership:
                self.joined.set_result(membership)
                await self._may_go.wait()
        except Exception as error:
            if self.joined.done():
                raise
            self.joined.set_exception(error)

    def _on_waiting(self, waiting: Waiting) -> None:
        self.waiting.put_nowait(waiting)
        self.arrived.set()

    def _on_lost(self, rank: int, reason: str, left: bool) -> None:
        self.lost.put_nowait((rank, reason, left))

    async def rank(self) -> int:
        return (await self.joined).topology.rank

    async def leave(self) -> None:
        """Say goodbye."""
        self._may_go.set()
        await self._task

    async def die(self) -> None:
        """End without a goodbye, as a crash does."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self.joined.cancel() and not self.joined.cancelled():
            self.joined.exception()  # marks the error as seen, even if the test did not ask
        if not self._task.cancelled():
            self._task.result()


@asynccontextmanager
async def people(address: str, *requests: JoinRequest, timeouts: Timeouts = TIMEOUTS) -> AsyncIterator[list[Person]]:
    """Some workers, which join the rendezvous in the order of the requests; those left at the end die."""
    persons: list[Person] = []
    try:
        for request in requests:
            persons.append(Person(address, request, timeouts))
            await persons[-1].arrived.wait()
        yield persons
    finally:
        for person in persons:
            await person.die()
