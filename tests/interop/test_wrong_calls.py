"""The error about a wrong call of torch's names the rule that the call breaks."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch._C import _distributed_c10d as c10d

from shardnet.backend import LoopbackBackend
from shardnet.errors import UsageError
from shardnet.interop import process_group
from shardnet.interop.process_group import ShardnetProcessGroup
from shardnet.interop.world import World
from shardnet.topology import Member, Topology
from shardnet.training.seat import Seat

Call = Callable[[ShardnetProcessGroup], object]


@pytest.fixture(scope="module")
def group() -> Iterator[ShardnetProcessGroup]:
    """Rank 0 of two; nothing is sent."""
    backends = LoopbackBackend.create_group(2)
    members = tuple(Member(rank, rank, 0, f"memory:{rank}", "here", f"worker{rank}") for rank in range(2))
    world = World(Seat(backends[0], Topology(1, 0, members)), AsyncExitStack())
    options = SimpleNamespace(group_id="wrong", timeout=timedelta(seconds=5.0), store=c10d.HashStore(), global_ranks_in_group=[])
    yield ShardnetProcessGroup(backends[0], world, options, owns=False)

    async def close() -> None:
        await asyncio.gather(*(each.aclose() for each in backends))

    asyncio.run(close())


def some(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size) for size in sizes]


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (
            lambda g: g.allgather([some(3)], some(3)),
            "this rank's as large as its input; got 1 outputs, and this rank's has 3 elements for an input of 3",
        ),
        (
            lambda g: g.allgather([some(2, 3)], some(3)),
            "needs one output for each rank, and this rank's as large as its input; got 2 outputs, and this rank's has 2 ",
        ),
        (lambda g: g.allgather([[]], some(3)), "got 0 outputs, and this rank's has no elements for an input of 3"),
        (lambda g: g.reduce_scatter(some(3), [some(3)]), "reduce_scatter over 2 ranks got 1 tensors; give one for each rank"),
        (lambda g: g.alltoall(some(3), some(3, 3)), "2 tensors to send and 1 to receive into; give one of each for each rank"),
        (lambda g: g.gather([some(3)], some(3)), "got 1 tensors to gather into on its destination; give one for each rank"),
        (lambda g: g.gather_single(*some(3, 3)), "gather: the tensor for all ranks together must have 6 elements, got 3"),
        (lambda g: g.scatter(some(3), [some(3, 3, 3)]), "got 3 tensors on its source; give one for each rank"),
        (lambda g: g.all_gather_single(*some(6), torch.zeros(3).double()), "the input is torch.float64; give both the same dtype"),
    ],
)
def test_the_rule_is_told(group: ShardnetProcessGroup, call: Call, complaint: str) -> None:
    with pytest.raises(UsageError) as refused:
        call(group)
    assert complaint in str(refused.value)


@pytest.mark.parametrize("rank", [2, 9, -1])
def test_a_rank_that_does_not_exist_is_refused_at_once(rank: int) -> None:
    """Others would wait for the whole timeout, and then name ranks that have come."""
    options = SimpleNamespace(timeout=timedelta(minutes=30.0), global_ranks_in_group=[], group_rank=rank, group_size=2)
    with pytest.raises(UsageError, match=rf"rank must be from 0 to 1 in a world of 2, got {rank}; check RANK and WORLD_SIZE"):
        process_group.create(options)
