"""Many collectives under way at once: none takes another's bytes, whatever the order of waiting."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.config import Limits
from shardnet.errors import CollectiveTimeout
from shardnet.testing import each_rank
from tests.contract.conftest import MakeCluster

Ranks = Sequence[Backend]
Started = list[tuple[Pending[torch.Tensor], torch.Tensor]]  # a handle and its expected result


def start(rank: Backend, kind: int, number: int, elements: int) -> tuple[Pending[torch.Tensor], torch.Tensor]:
    """Start a collective that cannot be mistaken for another one of the same program."""
    ranks, mine = rank.world_size, torch.full((elements,), number * 10 + rank.rank)
    total = sum(number * 10 + r for r in range(ranks))
    match kind:
        case 0:
            return rank.all_reduce(mine), torch.full((elements,), total)
        case 1:
            return rank.all_gather(mine), torch.cat([torch.full((elements,), number * 10 + r) for r in range(ranks)])
        case 2:
            return rank.broadcast(mine, number % ranks), torch.full((elements,), number * 10 + number % ranks)
        case 3:
            return rank.reduce_scatter(mine.repeat(ranks)), torch.full((elements,), total)
        case _:
            return rank.all_to_all(mine.repeat(ranks)), torch.cat([torch.full((elements,), number * 10 + r) for r in range(ranks)])


async def finish(started: Started, seed: int) -> None:
    """Wait in an order that differs from rank to rank."""
    random.Random(seed).shuffle(started)
    for handle, expected in started:
        assert torch.equal(await handle, expected)


async def test_hundreds_of_all_kinds(four: Ranks) -> None:
    async def work(rank: Backend) -> None:
        choose = random.Random(1)
        await finish([start(rank, choose.randrange(5), number, choose.choice((1, 2, 5, 30))) for number in range(400)], rank.rank)

    await each_rank(four, work)


async def test_more_than_may_be_outstanding(fresh: MakeCluster) -> None:
    """The rest waits for its turn, also if ranks start collectives in bursts at different times."""
    async with fresh(3, limits=Limits(chunk_bytes=64, eager_bytes=32, window_bytes=256, inline_bytes=16, max_outstanding=4)) as ranks:

        async def work(rank: Backend) -> None:
            choose = random.Random(2)
            numbers = [(choose.randrange(5), choose.choice((1, 5, 30))) for _ in range(100)]
            started: Started = []
            for number, (kind, elements) in enumerate(numbers):
                started.append(start(rank, kind, number, elements))
                if number % 17 == rank.rank * 5:
                    await started[random.Random(number).randrange(len(started))][0]
            await finish(started, rank.rank)

        await each_rank(ranks, work)


async def test_eight_equal_gathers_are_never_mixed_up(pair: Ranks) -> None:
    """Eight parameters of equal size, gathered at once and awaited backwards, 300 times (reference: regression 1)."""

    async def work(rank: Backend) -> None:
        for run in range(300):
            handles = [rank.all_gather(torch.full((2,), float(run * 100 + index * 10 + rank.rank))) for index in range(8)]
            for index in reversed(range(8)):
                first, second = float(run * 100 + index * 10), float(run * 100 + index * 10 + 1)
                assert (await handles[index]).tolist() == [first, first, second, second]

    await each_rank(pair, work)


async def test_sends_and_receives_of_a_pair_match_in_order(pair: Ranks) -> None:
    """They go both ways at once, between collectives, with up to 60 under way."""

    async def work(rank: Backend) -> None:
        other = 1 - rank.rank
        handles: list[Pending[Any]] = []
        received: list[Pending[torch.Tensor]] = []
        for number in range(60):
            elements = 1 + number % 40
            received.append(rank.recv(torch.empty(elements, dtype=torch.int64), other))
            handles.append(rank.send(torch.full((elements,), number * 10 + rank.rank), other))
            handles.append(rank.all_reduce(torch.ones(number)))
        for number, message in reversed(list(enumerate(received))):
            assert (await message).tolist() == [number * 10 + other] * (1 + number % 40)
        for handle in handles:
            await handle

    await each_rank(pair, work)


async def test_large_chunks_both_ways_at_once(fresh: MakeCluster) -> None:
    """Each sends before it reads: with blocking writes a ring locks up at 4 MiB (reference: regression 13)."""
    mib = 2**20
    async with fresh(2, limits=Limits(chunk_bytes=4 * mib, max_message_bytes=8 * mib)) as ranks:

        async def work(rank: Backend) -> None:
            mine = torch.arange(2 * mib, dtype=torch.int32) * (rank.rank + 1)  # 8 MiB: two chunks each way
            other = torch.arange(2 * mib, dtype=torch.int32) * (2 - rank.rank)
            sent, received = rank.send(mine, 1 - rank.rank), rank.recv(torch.empty_like(mine), 1 - rank.rank)
            summed = rank.all_reduce(mine)
            await sent
            assert torch.equal(await received, other)
            assert torch.equal(await summed, mine + other)

        await each_rank(ranks, work)


async def test_a_rank_that_runs_ahead(four: Ranks) -> None:
    """Rank 0 has started everything, and finished what it could, before the others begin: what it sent was kept."""

    def program(rank: Backend) -> Started:
        return [start(rank, number % 5, number, 1 + number % 12) for number in range(50)]

    ahead = program(four[0])
    await finish([(four[1].subgroup([1]).all_reduce(torch.ones(1)), torch.ones(1))], 0)  # let the loop turn
    others = [program(rank) for rank in four[1:]]
    for rank, started in enumerate([ahead, *others]):
        await finish(started, rank)


async def test_what_waits_for_its_turn_ends_when_its_time_is_over(fresh: MakeCluster) -> None:
    """It does not wait until those before it have ended; collectives after it go on."""
    async with fresh(2, limits=Limits(max_outstanding=2)) as ranks:
        first = [ranks[0].all_reduce(torch.ones(1)) for _ in range(2)]
        for call in (ranks[0].all_reduce, ranks[0].all_gather):
            with pytest.raises(CollectiveTimeout, match=r"did not end within 0\.1 s: missing rank 1 "):
                await call(torch.ones(1), timeout_s=0.1)
        last = ranks[0].all_reduce(torch.ones(1))
        assert not any(handle.done() for handle in first)
        theirs = [ranks[1].all_reduce(torch.ones(1)) for _ in first]
        for handle in (ranks[1].all_reduce(torch.ones(1)), ranks[1].all_gather(torch.ones(1))):
            with pytest.raises(CollectiveTimeout):
                await handle
        for handle in (*first, *theirs, last, ranks[1].all_reduce(torch.ones(1))):
            assert (await handle).item() == 2


async def test_messages_that_wait_for_their_turn_end_when_their_time_is_over(fresh: MakeCluster) -> None:
    async with fresh(2, limits=Limits(max_outstanding=2)) as ranks:
        first = [ranks[0].send(torch.ones(1), 1) for _ in range(2)]
        with pytest.raises(CollectiveTimeout, match=r"send #2 .* did not end within 0\.1 s: missing rank 1 "):
            await ranks[0].send(torch.ones(1), 1, timeout_s=0.1)
        assert not any(handle.done() for handle in first)
        for handle in first:
            await ranks[1].recv(torch.zeros(1), 0)
            await handle
        with pytest.raises(CollectiveTimeout):
            await ranks[1].recv(torch.zeros(1), 0)
