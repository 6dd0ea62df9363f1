"""A rank that cannot enter a collective, and says so instead of keeping the others waiting."""

import pytest
import torch

from shardnet.backend import Backend
from shardnet.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost
from shardnet.interop.reordered import in_order
from shardnet.testing import each_rank
from tests.contract.conftest import MakeCluster

ERRORS = [PeerLost("it has gone", 7), CollectiveTimeout("late", [5, 6]), CollectiveMismatch("other things"), MemoryError("full")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("elements", [1, 40_000])
@pytest.mark.parametrize("first", [True, False])
async def test_all_fail_as_the_rank_that_refuses(fresh: MakeCluster, error: Exception, elements: int, *, first: bool) -> None:
    async with fresh(3) as ranks:
        if first:
            ranks[1].refuse(error, label="layer")
        mine = torch.ones(elements)
        waiting = [rank.all_reduce(mine, label="layer").quietly() for rank in (ranks[0], ranks[2])]
        if not first:
            ranks[1].refuse(error, label="layer")
        for each in waiting:
            with pytest.raises(CollectiveError, match=f"of layer was aborted by rank 1: .*{error}") as caught:
                await each
            assert type(caught.value) is (type(error) if isinstance(error, CollectiveError) else CollectiveError)
            for what in ("rank", "missing"):
                assert getattr(caught.value, what, None) == getattr(error, what, None)

        async def go_on(rank: Backend) -> None:
            assert (await rank.all_reduce(torch.tensor([rank.rank]), label="the next one")).item() == 3

        await each_rank(ranks, go_on)


async def test_a_group_in_an_order_of_its_own(fresh: MakeCluster) -> None:
    async with fresh(3) as ranks:
        groups = [in_order(rank, [2, 0, 1]) for rank in ranks]
        groups[1].refuse(PeerLost("it has gone", 7))
        for group in (groups[0], groups[2]):
            with pytest.raises(PeerLost, match=r"was aborted by rank 1: .*it has gone"):
                await group.all_reduce(torch.ones(1))
