"""Collectives of groups with any ranks on any nodes: the right bits, and no unnecessary byte over a link between nodes."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardnet.backend import Backend, ReduceOp
from shardnet.collectives.operation import Operation
from shardnet.collectives.plans import balanced_bounds
from shardnet.collectives.route import Routing
from shardnet.config import Limits
from shardnet.testing import each_rank, jitter_cluster, local_cluster, loopback_cluster, same_bits
from shardnet.transport.memory import MemoryMesh
from shardnet.wire import Chunk
from tests.shared_loop import on_shared_loop

LIMITS = Limits(chunk_bytes=64, eager_bytes=0, window_bytes=256)  # nothing is small
Nodes = tuple[tuple[int, ...], ...]


def node_sum(parts: Sequence[torch.Tensor], node: Sequence[int], carrier: int) -> torch.Tensor:
    """A node's sum: for 16-bit floats in float32 by rank, otherwise beginning with the rank after the carrier."""
    place = node.index(carrier)
    wide = parts[0].dtype.itemsize == 2
    order = node if wide else [*node[place + 1 :], *node[: place + 1]]
    total = parts[order[0]].float() if wide else parts[order[0]]
    for rank in order[1:]:
        total = total + parts[rank]
    return total


def block_sum(parts: Sequence[torch.Tensor], nodes: Nodes, owner: int) -> torch.Tensor:
    """The sum over nodes, from the one after the owner's to the owner's, as the docstring of hierarchical.py says."""
    home = next(index for index, node in enumerate(nodes) if owner in node)
    place = nodes[home].index(owner)
    total: torch.Tensor | None = None
    for step in range(1, len(nodes) + 1):
        node = nodes[(home + step) % len(nodes)]
        more = node_sum(parts, node, node[place % len(node)])
        total = more if total is None else total + more
    assert total is not None
    return total.to(parts[0].dtype)


def numbers(count: int, dtype: torch.dtype, random: torch.Generator) -> torch.Tensor:
    """Random numbers whose sum shows its order. Added in float32, 16-bit floats would not show it without large numbers that cancel out."""
    values = torch.randn(count, generator=random)
    if dtype.itemsize == 2:
        large = torch.randint(-1, 3, (count,), generator=random)
        values = torch.where(large.abs() == 1, large * 2.0**13, values * 2.0**-14)
    return values.to(dtype)


@settings(max_examples=40)
@given(
    ranks=st.integers(3, 6),
    per_node=st.integers(1, 5),
    elements=st.integers(1, 200),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
@on_shared_loop
async def test_the_order_of_a_sum_is_that_of_the_nodes(ranks: int, per_node: int, elements: int, seed: int, dtype: torch.dtype) -> None:
    """Random floats under random delays, bit for bit."""
    if per_node == 1 and dtype.itemsize == 2:
        per_node = 2  # sums of 16-bit floats are exchanged where every rank is a node
    random = torch.Generator().manual_seed(seed)
    inputs = [numbers(elements * ranks, dtype, random) for _ in range(ranks)]
    nodes = tuple(tuple(range(first, min(first + per_node, ranks))) for first in range(0, ranks, per_node))
    async with jitter_cluster(ranks, seed, ranks_per_node=per_node, limits=LIMITS) as backends:

        async def work(rank: Backend) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            mine = inputs[rank.rank]
            own = rank.reduce_scatter(mine)
            whole = rank.all_reduce(mine)
            in_place = mine.clone()
            await rank.all_reduce(in_place, out=in_place)
            return await own, await whole, in_place

        results = await each_rank(backends, work)
    scattered = [torch.split(each, elements) for each in inputs]
    for owner, (own, _, _) in enumerate(results):
        assert same_bits(own, block_sum([parts[owner] for parts in scattered], nodes, owner))
    blocks = [
        block_sum([each[start:end] for each in inputs], nodes, owner)
        for owner, (start, end) in enumerate(balanced_bounds(elements * ranks, ranks))
    ]
    for _, whole, in_place in results:
        assert same_bits(whole, torch.cat(blocks))
        assert same_bits(in_place, whole)


@settings(max_examples=30)
@given(
    ranks=st.integers(3, 6),
    per_node=st.integers(1, 4),
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(0, 60), min_size=6, max_size=6),
)
@on_shared_loop
async def test_uneven_blocks_arrive(ranks: int, per_node: int, seed: int, sizes: list[int]) -> None:
    sizes = sizes[:ranks]
    parts = [torch.arange(size) + 1000 * rank for rank, size in enumerate(sizes)]
    async with jitter_cluster(ranks, seed, ranks_per_node=per_node, limits=LIMITS) as backends:

        async def work(rank: Backend) -> None:
            gathered = rank.all_gather(parts[rank.rank], sizes=sizes)
            scattered = rank.reduce_scatter(torch.cat(parts) * (rank.rank + 1), sizes=sizes)
            least = rank.all_reduce(torch.cat(parts) - rank.rank, ReduceOp.MIN)
            spread = [rank.broadcast(parts[root] if rank.rank == root else torch.zeros_like(parts[root]), root) for root in range(ranks)]
            assert torch.equal(await gathered, torch.cat(parts))
            assert torch.equal(await scattered, parts[rank.rank] * ranks * (ranks + 1) // 2)
            assert torch.equal(await least, torch.cat(parts) - ranks + 1)
            for root, handle in enumerate(spread):
                assert torch.equal(await handle, parts[root])

        await each_rank(backends, work)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Bytes of data from rank to rank."""
    counted: Counter[tuple[int, int]] = Counter()
    send = MemoryMesh.send

    async def counting(mesh: MemoryMesh, peer: int, chunk: Chunk) -> None:
        counted[mesh.rank, peer] += len(chunk.data)
        await send(mesh, peer, chunk)

    monkeypatch.setattr(MemoryMesh, "send", counting)
    return counted


def across(sent: Counter[tuple[int, int]], nodes: Nodes) -> list[int]:
    """Bytes that left each node since the last look."""
    home = {rank: index for index, node in enumerate(nodes) for rank in node}
    left = [0] * len(nodes)
    for (source, target), size in sent.items():
        if home[source] != home[target]:
            left[home[source]] += size
    sent.clear()
    return left


@pytest.mark.parametrize("per_node", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 3])
async def test_each_link_carries_the_least_possible(sent: Counter[tuple[int, int]], count: int, per_node: int) -> None:
    """(M - 1)/M of the data per lap, however many ranks a node has; each of them sends its part of that."""
    ranks = count * per_node
    nodes = tuple(tuple(range(first, first + per_node)) for first in range(0, ranks, per_node))
    whole = torch.ones(60 * ranks)
    lap = whole.nbytes * (count - 1) // count
    async with loopback_cluster(ranks, ranks_per_node=per_node, limits=LIMITS) as backends:
        await each_rank(backends, lambda rank: rank.all_gather(whole[:60]))
        shares = {
            sum(size for (source, target), size in sent.items() if source == rank and target not in node) for node in nodes for rank in node
        }
        assert shares == {lap // per_node}
        assert across(sent, nodes) == [lap] * count
        await each_rank(backends, lambda rank: rank.reduce_scatter(whole))
        assert across(sent, nodes) == [lap] * count
        await each_rank(backends, lambda rank: rank.all_reduce(whole))
        assert across(sent, nodes) == [2 * lap] * count
        await each_rank(backends, lambda rank: rank.broadcast(whole, 1))
        assert sorted(across(sent, nodes)) == [0, *[whole.nbytes] * (count - 1)]


async def test_sums_of_16_bit_floats_cross_once_a_node_as_float32(sent: Counter[tuple[int, int]]) -> None:
    nodes, whole = ((0, 1, 2), (3, 4, 5)), torch.ones(360, dtype=torch.bfloat16)
    async with loopback_cluster(6, ranks_per_node=3, limits=LIMITS) as backends:
        await each_rank(backends, lambda rank: rank.reduce_scatter(whole))
        assert across(sent, nodes) == [360 // 2 * 4] * 2


@pytest.mark.parametrize(("routing", "left"), [(Routing.AUTO, [480, 480]), (Routing.RING, [720, 720]), (Routing.DIRECT, [960, 960])])
async def test_a_forced_routing(sent: Counter[tuple[int, int]], routing: Routing, left: list[int]) -> None:
    """What two nodes of two ranks send to each other while they gather 960 bytes."""
    async with loopback_cluster(4, ranks_per_node=2, routing=routing, limits=LIMITS) as backends:
        results = await each_rank(backends, lambda rank: rank.all_gather(torch.full((60,), float(rank.rank))))
        assert across(sent, ((0, 1), (2, 3))) == left
        assert all(torch.equal(result, torch.arange(4.0).repeat_interleave(60)) for result in results)


async def test_loans_are_back_before_what_comes_across(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node's ranks add up what they lend each other while the other node is late, so they need not wait for each other at the end."""
    ones, returned, return_loan = torch.ones(4 * 300_000), set[tuple[int, int]](), Operation.return_loan

    async def watched(self: Operation, lender: int) -> None:
        if lender in self._lenders:
            returned.add((self.group.rank, lender))
        await return_loan(self, lender)

    monkeypatch.setattr(Operation, "return_loan", watched)
    async with local_cluster(4, ranks_per_node=2) as ranks:
        early = [rank.reduce_scatter(ones) for rank in ranks[:2]]
        async with asyncio.timeout(10.0):
            while returned != {(0, 1), (1, 0)}:  # noqa: ASYNC110 - on another loop
                await asyncio.sleep(0.01)
        assert not any(handle.done() for handle in early)
        for handle in (*early, *(rank.reduce_scatter(ones) for rank in ranks[2:])):
            assert (await handle == 4).all()
