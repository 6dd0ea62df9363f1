"""What the flight recorder says about collectives, whichever way their data goes."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import torch

from shardnet.backend import Backend
from shardnet.config import Limits
from shardnet.errors import ClosedError, CollectiveMismatch, CollectiveTimeout
from shardnet.flight import Flight, State
from shardnet.loop import LoopThread
from shardnet.testing import each_error, each_rank, local_cluster, loopback_cluster
from shardnet.transport.shared_memory import futex

KINDS = ("loopback", "grpc", pytest.param("letters", marks=pytest.mark.skipif(not futex.available, reason="mailboxes need x86-64")))
SMALL, LARGE = torch.ones(4), torch.ones(1000)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def cluster(kind: str, size: int, **limits: int) -> AbstractAsyncContextManager[Sequence[Backend]]:
    if kind == "loopback":
        return loopback_cluster(size, limits=Limits(**limits))
    return local_cluster(size, limits=Limits(letter_bytes=64 if kind == "letters" else 0, **limits))


def flights(rank: Backend) -> list[Flight]:
    return rank.telemetry.flights.last()


async def until_waiting(rank: Backend) -> None:
    """Wait until the newest collective waits for a rank; on the loop thread, so that others get their turn."""

    async def look() -> None:
        async with asyncio.timeout(5.0):
            while flights(rank)[-1].state is State.BEGUN:  # noqa: ASYNC110 - a record tells nobody when it changes
                await asyncio.sleep(0.001)

    await LoopThread.shared().run_here(look())


async def test_all_are_recorded_in_their_order(kind: str) -> None:
    async with cluster(kind, 2) as ranks:

        async def work(rank: Backend) -> None:
            rank.telemetry.step = 5
            await rank.all_reduce(SMALL, label="small")
            await rank.all_gather(LARGE)
            pair = rank.subgroup([0, 1])
            await pair.barrier()
            if rank.rank:
                await rank.send(SMALL, 0)
            else:
                await rank.recv(SMALL.clone(), 1)

        await each_rank(ranks, work)
        for rank in ranks:
            found = flights(rank)
            assert [(each.name, each.party.members, each.step, each.state) for each in found] == [
                ("all_reduce #0 of small", (0, 1), 5, State.DONE),
                ("all_gather #1", (0, 1), 5, State.DONE),
                ("barrier #0", (0, 1), 5, State.DONE),
                (f"{'send' if rank.rank else 'recv'} #0", (0, 1), 5, State.DONE),
            ]
            assert len({each.party for each in found}) == 3  # the world, the pair and the channel count apart
            assert all(0 < each.begun_ns <= each.entered_ns <= each.ended_ns for each in found)
            assert [each.bytes_sent for each in found] == [16, 4000, 0, 16 if rank.rank else 0]


async def test_one_that_waits_says_so_until_it_ends(kind: str) -> None:
    async with cluster(kind, 2) as ranks:
        early = ranks[0].barrier()
        assert not early.done()
        await until_waiting(ranks[0])
        (flight,) = flights(ranks[0])
        assert (flight.state, flight.ended_ns) == (State.WAITING, 0)
        await ranks[1].barrier()
        await early
        assert flight.state is State.DONE


async def test_one_whose_turn_has_not_come_has_only_begun(kind: str) -> None:
    async with cluster(kind, 2, max_outstanding=2) as ranks:
        early = [ranks[0].barrier() for _ in range(3)]
        await LoopThread.shared().run_here(_nothing())
        assert (flights(ranks[0])[-1].entered_ns, flights(ranks[0])[-1].state) == (0, State.BEGUN)
        for _ in early:
            await ranks[1].barrier()
        for handle in early:
            await handle
        assert [each.state for each in flights(ranks[0])] == [State.DONE] * 3


async def _nothing() -> None:
    """Runs after everything that the loop thread was told before."""


async def test_one_that_fails_names_the_error(kind: str) -> None:
    async with cluster(kind, 2) as ranks:

        async def work(rank: Backend) -> Any:
            return await (rank.barrier() if rank.rank else rank.all_gather(SMALL))

        errors = await each_error(ranks, work)
        assert {type(error) for error in errors} == {CollectiveMismatch}
        with pytest.raises(CollectiveTimeout):
            await ranks[0].barrier(timeout_s=0.05)
        assert [(each.state, each.error) for each in flights(ranks[0])] == [
            (State.FAILED, "CollectiveMismatch"),
            (State.FAILED, "CollectiveTimeout"),
        ]


async def test_those_that_an_abort_ends_have_failed_even_before_their_turn(kind: str) -> None:
    async with cluster(kind, 2, max_outstanding=2) as ranks:
        handles = [ranks[0].barrier() for _ in range(4)]
        ranks[0].abort()
        for handle in handles:
            with pytest.raises(ClosedError):
                await handle
        assert [(each.state, each.error) for each in flights(ranks[0])] == [(State.FAILED, "ClosedError")] * 4
