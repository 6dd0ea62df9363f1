"""One buffer per node: where gathered data lies, and who sees what is written there."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shardnet.backend import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.collectives.hierarchical import Hierarchical
from shardnet.collectives.letters.letter_round import LetterRound
from shardnet.collectives.letters.loan_round import LoanRound
from shardnet.config import KIB
from shardnet.errors import InvalidRankError, UsageError
from shardnet.testing import each_rank, local_cluster, loopback_cluster
from shardnet.transport.shared_memory import futex, lending
from tests.collectives.commons import LIMITS, ROWS, gather, gathered, release


@pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")
@pytest.mark.parametrize(("rows", "kind"), [(1024, LetterRound), (1025, LoanRound)])
async def test_what_a_letter_could_hold_as_a_whole_is_sooner_by_letter(rows: int, kind: type) -> None:
    async with local_cluster(2, limits=replace(LIMITS, eager_bytes=8 * KIB)) as ranks:
        handles = [rank.all_gather_on_node(torch.full((rows,), float(rank.rank))) for rank in ranks]
        handles += [rank.broadcast_on_node(torch.full((2 * rows,), float(rank.rank)), 1) for rank in ranks]
        assert {type(handle._future) for handle in handles} == {kind}
        buffers = [await handle for handle in handles]
        for buffer in buffers[:2]:
            assert torch.equal(buffer.tensor, gathered(2, rows))
        for buffer in buffers[2:]:
            assert torch.equal(buffer.tensor, torch.ones(2 * rows))
        release(buffers)


@pytest.mark.parametrize("per_node", [2, 3, 4])
async def test_the_ranks_of_a_node_have_it_in_the_same_memory(per_node: int) -> None:
    async with local_cluster(5, ranks_per_node=per_node, limits=LIMITS) as ranks:
        buffers = await each_rank(ranks, gather())
        assert all(torch.equal(buffer.tensor, gathered(5)) for buffer in buffers)
        for rank, buffer in enumerate(buffers):
            neighbours = [other for other in range(5) if other // per_node == rank // per_node and other != rank]
            assert buffer.shared == bool(neighbours)
            for slot in ranks[rank]._group.commons._slots.values():
                slot.segment.shared.view(np.float32)[rank] = 99.0
            for other in range(5):
                assert (buffers[other].tensor[rank] == 99.0) == (other in (rank, *neighbours) and buffer.shared)
        release(buffers)


@pytest.mark.parametrize("root", [0, 3])
@pytest.mark.parametrize("per_node", [2, 3, 5])
async def test_a_broadcast_is_written_once_a_node(per_node: int, root: int) -> None:
    async with local_cluster(5, ranks_per_node=per_node, limits=LIMITS) as ranks:
        given = [torch.arange(ROWS) + rank for rank in range(5)]
        buffers = await each_rank(ranks, lambda rank: rank.broadcast_on_node(given[rank.rank].view(-1, 2), root))
        assert all(torch.equal(buffer.tensor, given[root].view(-1, 2)) for buffer in buffers)
        for rank, buffer in enumerate(buffers):
            neighbours = [other for other in range(5) if other // per_node == rank // per_node and other != rank]
            assert buffer.shared == bool(neighbours)
            assert torch.equal(given[rank], torch.arange(ROWS) + rank), "what a rank gave was written to"
            for slot in ranks[rank]._group.commons._slots.values():
                slot.segment.shared.view(np.int64)[rank] = -99
            seen = [other for other in range(5) if buffers[other].shared and buffers[other].tensor.view(-1)[rank] == -99]
            assert seen == (sorted([rank, *neighbours]) if neighbours else [])
        release(buffers)


async def test_a_broadcast_comes_in_the_tensor_where_no_memory_is_shared() -> None:
    async with local_cluster(3, limits=LIMITS, shared_memory=False) as ranks:
        given = [torch.full((ROWS,), float(rank)) for rank in range(3)]
        buffers = await each_rank(ranks, lambda rank: rank.broadcast_on_node(given[rank.rank], 2))
        assert not any(buffer.shared for buffer in buffers)
        assert all(torch.equal(buffer.tensor, torch.full((ROWS,), 2.0)) for buffer in buffers)
        with pytest.raises(InvalidRankError, match="broadcast root"):
            ranks[0].broadcast_on_node(given[0], 3)
        with pytest.raises(UsageError, match="contiguous"):
            ranks[0].broadcast_on_node(torch.ones(ROWS, 2)[:, 0], 0)


async def test_what_a_rank_writes_only_it_sees_and_not_for_long() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        for turn in range(4):
            buffers = await each_rank(ranks, gather(add=float(turn)))
            assert all(torch.equal(buffer.tensor, gathered(3, add=float(turn))) for buffer in buffers)
            buffers[turn % 3].tensor.numpy()[:] = -1.0
            buffers[(turn + 1) % 3].tensor.mul_(100.0)
            assert torch.equal(buffers[(turn + 2) % 3].tensor, gathered(3, add=float(turn)))
            release(buffers)


async def test_nobody_copies_what_a_neighbour_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(lending.Borrowed, "read", read)
    async with local_cluster(3, limits=LIMITS) as ranks:
        release(await each_rank(ranks, gather()))
        assert [rank.telemetry.bytes_sent for rank in ranks] == [2 * 4 * ROWS] * 3  # to whom it is there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
@pytest.mark.parametrize("per_node", [1, 2, 4])
async def test_any_sizes_and_dtypes(per_node: int, dtype: torch.dtype) -> None:
    sizes = [3_000, 0, 7_001, 5]
    async with local_cluster(4, ranks_per_node=per_node, limits=LIMITS) as ranks, loopback_cluster(4) as reference:

        async def work(rank: Backend) -> torch.Tensor:
            mine = (torch.arange(sizes[rank.rank] * 3) % 100 + rank.rank).view(-1, 3).to(dtype)
            buffer = await rank.all_gather_on_node(mine, sizes=sizes)
            return buffer.tensor

        expected = await each_rank(reference, work)
        for result in await each_rank(ranks, work):
            assert result.shape == (sum(sizes), 3)
            assert torch.equal(result, expected[0])


async def test_what_is_small_is_not_worth_it() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        buffers = await each_rank(ranks, gather(10))
        assert not any(buffer.shared for buffer in buffers)
        assert torch.equal(buffers[0].tensor, gathered(2, 10))


async def test_all_nodes_get_the_same_bytes_when_a_shard_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other nodes get the bytes in this node's buffer."""
    shards = [torch.full((ROWS,), float(rank)) for rank in range(4)]
    write = Hierarchical._write_own

    async def then_change(algorithm: Hierarchical) -> None:
        await write(algorithm)
        for shard in shards:
            shard.fill_(99.0)

    async with local_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
        monkeypatch.setattr(Hierarchical, "_write_own", then_change)
        buffers = await each_rank(ranks, lambda rank: rank.all_gather_on_node(shards[rank.rank]))
        assert all(torch.equal(buffer.tensor, buffers[0].tensor) for buffer in buffers)
        release(buffers)


async def test_what_was_gathered_outlives_the_backend() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        buffers = await each_rank(ranks, gather())
    assert torch.equal(buffers[0].tensor, gathered(2))
    release(buffers)
    del buffers


async def test_many_at_once() -> None:
    async with local_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
        groups = [[rank.subgroup(range(4)) for rank in ranks] for _ in range(2)]

        async def work(rank: ClusterBackend) -> None:
            pending = [groups[turn % 2][rank.rank].all_gather_on_node(torch.full((ROWS,), float(rank.rank + turn))) for turn in range(20)]
            for turn, handle in enumerate(pending):
                buffer = await handle
                assert torch.equal(buffer.tensor, gathered(4, add=float(turn)))
                if turn % 3:
                    buffer.release()

        await asyncio.gather(*map(work, ranks))
