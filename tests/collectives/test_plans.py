"""How data is cut into blocks, which algorithm takes it, and how much of it travels."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardnet.backend import Backend, Pending
from shardnet.collectives.plans import balanced_bounds, bounds_of
from shardnet.config import Limits
from shardnet.testing import each_rank, loopback_cluster

LIMITS = Limits(chunk_bytes=64, eager_bytes=32, window_bytes=256)


def test_seven_over_three() -> None:
    assert balanced_bounds(7, 3) == [(0, 3), (3, 5), (5, 7)]


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_balanced_bounds_are_those_of_the_reference(elements: int, ranks: int) -> None:
    """Chunk i starts at i·q + min(i, m) and has length q + (i < m), with q, m = divmod(D, N)."""
    q, m = divmod(elements, ranks)
    bounds = balanced_bounds(elements, ranks)
    assert bounds == [(i * q + min(i, m), i * q + min(i, m) + q + (i < m)) for i in range(ranks)]
    assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert (bounds[0][0], bounds[-1][1]) == (0, elements)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=64))
def test_blocks_of_given_sizes(sizes: list[int]) -> None:
    bounds = bounds_of(sizes)
    assert [end - start for start, end in bounds] == sizes
    assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert bounds[0][0] == 0


async def traffic(ranks: Sequence[Backend], op: str, tensor: torch.Tensor, **arguments: int) -> list[int]:
    """Bytes of data that each rank sends in one collective."""

    async def work(rank: Backend) -> int:
        before = rank.telemetry.bytes_sent
        handle: Pending[torch.Tensor] = getattr(rank, op)(tensor, **arguments)
        await handle
        return rank.telemetry.bytes_sent - before

    return await each_rank(ranks, work)


@pytest.mark.parametrize("ranks_per_node", [1, 5], ids=["ring", "one node"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
async def test_bytes_sent_are_the_least_possible(ranks: int, dtype: torch.dtype, ranks_per_node: int) -> None:
    """2(N−1)/N·D·itemsize for an all_reduce, half of it for either of its halves, and no rank does more than another."""
    elements = 200 * ranks
    whole = torch.ones(elements, dtype=dtype)
    share = (ranks - 1) * elements // ranks * dtype.itemsize
    async with loopback_cluster(ranks, ranks_per_node=ranks_per_node, limits=LIMITS) as backends:
        assert await traffic(backends, "all_reduce", whole) == [2 * share] * ranks
        assert await traffic(backends, "reduce_scatter", whole) == [share] * ranks
        assert await traffic(backends, "all_gather", whole[: elements // ranks]) == [share] * ranks
        assert await traffic(backends, "all_to_all", whole) == [share] * ranks


async def test_a_broadcast_passes_each_link_once() -> None:
    async with loopback_cluster(4, ranks_per_node=1, limits=LIMITS) as backends:
        x = torch.ones(100)
        assert await traffic(backends, "broadcast", x, root=1) == [0, 400, 400, 400]
        assert await traffic(backends, "broadcast", x[:8], root=1) == [0, 96, 0, 0]  # small: root sends to each


async def test_on_one_node_a_broadcast_comes_from_the_root_alone() -> None:
    """Where memory is shared the data is written once, but counts for each rank that reads it."""
    async with loopback_cluster(4, limits=LIMITS) as backends:
        assert await traffic(backends, "broadcast", torch.ones(100), root=1) == [0, 1200, 0, 0]


async def test_a_group_within_a_node_is_direct_though_the_world_is_not() -> None:
    async with loopback_cluster(4, ranks_per_node=2, limits=LIMITS) as backends:
        pairs = [backend.subgroup([0, 1] if backend.rank < 2 else [2, 3]) for backend in backends]
        assert await traffic(pairs, "broadcast", torch.ones(100), root=0) == [400, 0, 400, 0]
        crossing = [backends[rank].subgroup([0, 2]) for rank in (0, 2)]
        assert await traffic(crossing, "broadcast", torch.ones(100), root=0) == [400, 0]
        assert [group._group.route.nodes for group in (*pairs, *crossing)] == [1] * 4 + [2] * 2


async def test_small_ones_take_one_step() -> None:
    """Up to the eager limit everyone sends to everyone; an all_reduce with one element more takes two steps, which send less."""
    async with loopback_cluster(4, limits=LIMITS) as backends:
        assert await traffic(backends, "all_gather", torch.ones(8)) == [3 * 32] * 4
        assert await traffic(backends, "all_reduce", torch.ones(4)) == [3 * 16] * 4
        assert sum(await traffic(backends, "all_reduce", torch.ones(5))) == 2 * 3 * 20
        assert await traffic(backends, "all_reduce", torch.ones(32)) == [2 * 3 * 32] * 4


async def test_what_is_small_is_less_where_ranks_share_a_link() -> None:
    """A small broadcast goes from the root to each rank; a larger one once to the neighbour and once across, or around the ring."""
    limits = Limits(chunk_bytes=64, eager_bytes=64, window_bytes=256, inline_bytes=16)
    for per_node, small, larger in ((1, 64, [0, 68, 68, 68]), (2, 16, [0, 40, 0, 20])):
        async with loopback_cluster(4, ranks_per_node=per_node, limits=limits) as backends:
            assert await traffic(backends, "broadcast", torch.ones(small // 4), root=1) == [0, 3 * small, 0, 0]
            assert await traffic(backends, "broadcast", torch.ones(small // 4 + 1), root=1) == larger


async def test_the_largest_share_of_all_decides() -> None:
    """All ranks must choose alike: one large share sends everyone around the ring."""
    async with loopback_cluster(3, limits=LIMITS) as backends:
        sizes = [1, 9, 1]

        async def work(rank: Backend) -> list[float]:
            gathered = await rank.all_gather(torch.full((sizes[rank.rank],), float(rank.rank)), sizes=sizes)
            return gathered.tolist()

        assert await each_rank(backends, work) == [[0.0, *[1.0] * 9, 2.0]] * 3
