"""Collectives under schedules that an idle machine never shows: chunks arrive early, late, and between two steps of a rank.

The tests run on shardnet's own loop, so that only the seed decides what happens when.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardnet.backend import Backend, Pending
from shardnet.config import Limits
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, PeerLost, ShardnetError
from shardnet.testing import bits, jitter_cluster
from tests.shared_loop import on_shared_loop

LIMITS = Limits(chunk_bytes=64, eager_bytes=32, window_bytes=256, max_outstanding=6)
PATIENCE_S = 20.0
seeds = st.integers(0, 100_000)  # they choose delays, and how many ranks are on a node


def program(rank: Backend, timeout_s: float | None = None) -> list[Pending[Any]]:
    """Each collective, in each of its algorithms."""
    handles: list[Pending[Any]] = []
    for size in (1, 2, 12, 60):
        x = torch.arange(size * 3.0) + rank.rank
        handles += [
            rank.all_reduce(x, timeout_s=timeout_s),
            rank.all_reduce(x.bfloat16(), timeout_s=timeout_s),
            rank.barrier(timeout_s=timeout_s),
            rank.broadcast(x, size % 3, timeout_s=timeout_s),
            rank.all_gather(x, timeout_s=timeout_s),
            rank.all_gather(x[: size if rank.rank == 1 else 0], sizes=[0, size, 0], timeout_s=timeout_s),
            rank.reduce_scatter(x, timeout_s=timeout_s),
            rank.reduce_scatter(x.half(), timeout_s=timeout_s),
            rank.all_to_all(x, timeout_s=timeout_s),
            rank.send(x, (rank.rank + 1) % 3, timeout_s=timeout_s),
            rank.recv(torch.empty_like(x), (rank.rank - 1) % 3, timeout_s=timeout_s),
        ]
    return handles


async def settle(handle: Pending[Any]) -> bytes | ShardnetError:
    """How a collective ends; it must end, and if with an error, then with one of ours."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            result = await handle
    except ShardnetError as error:
        return error
    return b"" if result is None else bits(result)


async def results(ranks: Sequence[Backend]) -> list[list[bytes | ShardnetError]]:
    started = [program(rank) for rank in ranks]
    return [[await settle(handle) for handle in handles] for handles in started]


@settings(max_examples=15)
@given(seeds)
@on_shared_loop
async def test_results_do_not_depend_on_the_schedule(seed: int) -> None:
    async with jitter_cluster(3, 0, ranks_per_node=1, limits=LIMITS) as ranks:
        usual = await results(ranks)
    async with jitter_cluster(3, seed, ranks_per_node=1 + seed % 3, limits=LIMITS) as ranks:
        assert await results(ranks) == usual


@settings(max_examples=20)
@given(seeds, st.integers(0, 2), st.integers(0, 40))
@on_shared_loop
async def test_a_mismatch_is_everyones_and_stays_where_it_was(seed: int, odd: int, position: int) -> None:
    """One rank calls another collective once. Nobody may compute with its data, and everything that follows is right."""
    async with jitter_cluster(3, seed, ranks_per_node=1 + seed % 3, limits=LIMITS) as ranks:
        handles = []
        for rank in ranks:
            before = [rank.all_reduce(torch.ones(1 + number % 20)) for number in range(position)]
            wrong: Pending[Any] = rank.broadcast(torch.ones(50), 0) if rank.rank == odd else rank.all_gather(torch.ones(position * 2 + 1))
            after = [rank.all_reduce(torch.ones(1 + number % 20)) for number in range(10)]
            handles.append((before, wrong, after))
        for before, wrong, after in handles:
            assert isinstance(await settle(wrong), CollectiveMismatch)
            for handle in before + after:
                assert ((await handle) == 3).all()


@settings(max_examples=20)
@given(seeds, st.integers(0, 300))
@on_shared_loop
async def test_an_abort_at_any_moment_ends_everything(seed: int, turns: int) -> None:
    """Each collective ends: with the right result, or with the loss of rank 1; on rank 1 itself, with its being closed."""
    async with jitter_cluster(3, seed, ranks_per_node=1 + seed % 3, limits=LIMITS) as ranks:
        started = [program(rank) for rank in ranks]
        for _ in range(turns):
            await asyncio.sleep(0)
        ranks[1].abort()
        outcomes = [[await settle(handle) for handle in handles] for handles in started]
    async with jitter_cluster(3, 0, ranks_per_node=1, limits=LIMITS) as ranks:
        usual = await results(ranks)
    for rank, (got, wanted) in enumerate(zip(outcomes, usual, strict=True)):
        for outcome, right in zip(got, wanted, strict=True):
            if rank == 1:
                assert outcome == right or isinstance(outcome, ClosedError)
            else:
                assert outcome == right or (isinstance(outcome, PeerLost) and outcome.rank == 1)


@settings(max_examples=15)
@given(seeds, st.integers(0, 60))
@on_shared_loop
async def test_leaving_at_any_moment_loses_nothing(seed: int, turns: int) -> None:
    """Rank 1 has started everything when it closes: all of it ends well, on all ranks."""
    async with jitter_cluster(3, seed, ranks_per_node=1 + seed % 3, limits=LIMITS) as ranks:
        mine = program(ranks[1])
        leaving = asyncio.ensure_future(ranks[1].aclose())
        for _ in range(turns):
            await asyncio.sleep(0)
        others = [program(ranks[0]), program(ranks[2])]
        for handle in (*others[0], *others[1], *mine):
            assert isinstance(await settle(handle), bytes)
        await leaving
        with pytest.raises(PeerLost):
            await ranks[0].barrier()


@settings(max_examples=8)
@given(seeds)
@on_shared_loop
async def test_a_missing_rank_ends_what_waits_for_it(seed: int) -> None:
    """All collectives of two ranks time out at about the same time, while probes and aborts cross; the third is told late."""
    async with jitter_cluster(3, seed, ranks_per_node=1 + seed % 3, limits=LIMITS) as ranks:
        waiting = [program(rank, timeout_s=0.05) for rank in ranks[:2]]
        outcomes = [[await settle(handle) for handle in handles] for handles in waiting]
        between = {9, 20, 31, 42}  # the sends of rank 0 to rank 1; rank 1's receives come behind them
        for rank, ends in enumerate(outcomes):
            for number, outcome in enumerate(ends):
                if (rank == 0 and number in between) or (rank == 1 and number - 1 in between):
                    continue
                assert isinstance(outcome, CollectiveError)
        for outcome in [await settle(handle) for handle in program(ranks[2], timeout_s=0.05)]:
            assert isinstance(outcome, CollectiveError | bytes)
        sums = [rank.all_reduce(torch.ones(40)) for rank in ranks]
        assert [(await handle)[0].item() for handle in sums] == [3.0] * 3
