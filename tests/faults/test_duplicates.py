"""Two workers that claim to be the same one: the second is refused within half a second, and the first works on."""

import asyncio
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.errors import JoinRefused, ListenError
from shardnet.pb import stats_pb2
from shardnet.rendezvous.client import join, status
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.transport.connection import PlainConnection
from shardnet.transport.dialing import _connect
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.http2 import Call, Status
from shardnet.transport.outbox import PUSH
from tests.faults.at_work import JOB, Work, at_work
from tests.faults.ledger import Scenario, scenario
from tests.faults.ports import dissolve, mesh_of, ports
from tests.promises import within_s
from tests.shared_loop import on_shared_loop
from tests.training.workers import Nursery

SEED = 20_261_128
TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits()
REFUSED_S = within_s(0.5)
times = pytest.mark.parametrize("times", [5, pytest.param(50, marks=pytest.mark.faults)])


@contextmanager
def soon(figures: Scenario) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    figures.detected_s.append(time.monotonic() - started_s)
    figures.repeats += 1
    assert figures.detected_s[-1] <= REFUSED_S


def request(work: Work, **changes: object) -> JoinRequest:
    """The request of a second start of the first worker."""
    return replace(JoinRequest(JOB, "another start", work.workers[0].address, "node", 2, 2), **changes)  # type: ignore[arg-type]


async def refused(work: Work, wish: JoinRequest) -> Refusal:
    with pytest.raises(JoinRefused) as caught:
        await join(work.rendezvous, wish, timeouts=TIMEOUTS).__aenter__()
    return Refusal(caught.value.reason)


@times
def test_a_second_member(nursery: Nursery, times: int) -> None:
    """It claims the first one's address or incarnation, or is a restart while the first one is only frozen."""
    with at_work(nursery) as work, scenario("a second worker with the same address or id", SEED, kept=times > 5) as figures:

        @on_shared_loop
        async def claim() -> None:
            for _ in range(times):
                with soon(figures):
                    assert await refused(work, request(work)) in (Refusal.DUPLICATE_ADDRESS, Refusal.RUNNING)
            alone = request(work, job="other", address="127.0.0.1:1", incarnation="mine", max_world_size=3, min_world_size=3)
            first = asyncio.ensure_future(join(work.rendezvous, alone, timeouts=TIMEOUTS).__aenter__())
            while not await known(work):  # until its request has arrived
                pass
            for _ in range(times):
                with soon(figures):
                    assert await refused(work, alone) is Refusal.DUPLICATE_INCARNATION
                with soon(figures):
                    assert await refused(work, replace(alone, incarnation="another")) is Refusal.DUPLICATE_ADDRESS
            first.cancel()
            await asyncio.wait({first})

        claim()
        work.workers[0].signal(signal.SIGSTOP)  # its lease is still open

        @on_shared_loop
        async def start_again() -> None:
            for _ in range(times):
                with soon(figures):
                    assert await refused(work, request(work, replacement=True)) in (Refusal.DUPLICATE_ADDRESS, Refusal.RUNNING)

        start_again()
        work.workers[0].signal(signal.SIGCONT)


async def known(work: Work) -> bool:
    """Whether the first of the two has joined."""
    return any(job.job == "other" and job.joined for job in await status(work.rendezvous))


@times
def test_a_second_process_on_a_port(nursery: Nursery, times: int) -> None:
    with at_work(nursery) as work, scenario("two processes on one port", SEED, kept=times > 5) as figures:

        @on_shared_loop
        async def listen() -> None:
            for address in (work.workers[0].address, work.rendezvous) * times:
                with soon(figures), pytest.raises(ListenError, match="another process already listens there"):
                    await Endpoint(address, limits=LIMITS, timeouts=TIMEOUTS, snapshot=stats_pb2.SnapshotReply).start()

        listen()


@times
@on_shared_loop
async def test_a_second_stream_of_a_rank(times: int) -> None:
    """The caller knows everything about the first one: it does not get that rank's place, and the first one does not lose it."""
    with scenario("two streams of one rank", SEED, kept=times > 5) as figures:
        async with ports(2, timeouts=TIMEOUTS, limits=LIMITS) as pool:
            ranks = await pool.form()
            for _ in range(times):
                with soon(figures):
                    address = Address.parse(mesh_of(ranks[0]).address(0))
                    call = Call(PlainConnection(await _connect(address)), LIMITS)
                    call.open(str(address), PUSH, mesh_of(ranks[1])._outboxes[0]._hello.metadata())
                    assert Status.read(await call.headers()).details == "rank 1 already has an open stream to this rank"
                    call.close()
                await asyncio.gather(*(rank.barrier() for rank in ranks))
            await dissolve(ranks)
