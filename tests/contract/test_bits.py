"""Bits that arithmetic would lose survive, and every rank, every run and every backend ends with the same bits."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, ReduceOp
from shardnet.collectives.letters.letter_round import LetterRound
from shardnet.collectives.letters.loan_round import LoanRound
from shardnet.collectives.route import Routing
from shardnet.testing import bits, each_rank, local_cluster, loopback_cluster, same_bits
from shardnet.transport.shared_memory import Sharing
from shardnet.transport.shared_memory.window import Window
from tests.contract.conftest import ENGINES, LIMITS, MakeCluster, cluster
from tests.devices import on_test_device

Ranks = Sequence[Backend]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
AS_INTEGER = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def strange(dtype: torch.dtype, elements: int) -> torch.Tensor:
    """`count` of these: quiet and signalling NaNs with payloads, infinities, both zeros, the smallest and the largest numbers."""
    info, whole = torch.finfo(dtype), AS_INTEGER[dtype.itemsize]
    values = torch.tensor(
        [torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, info.tiny, info.smallest_normal / 2, info.max, info.min]
    )
    infinity = torch.tensor([torch.inf, -torch.inf], dtype=dtype).view(whole)
    payloads = torch.cat([infinity + 1, infinity + 5]).view(dtype)
    every = torch.cat([values.double().to(dtype), payloads])
    return every.repeat(elements // len(every) + 1)[:elements]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
async def test_strange_floats_arrive_bit_for_bit(four: Ranks, dtype: torch.dtype) -> None:
    """Directly, and chunk by chunk around the ring."""
    for elements in (3, 14, 2 * LIMITS.chunk_bytes // dtype.itemsize + 3):
        mine = strange(dtype, elements)

        async def work(rank: Backend, mine: torch.Tensor = mine) -> None:
            assert same_bits(await rank.all_gather(mine), mine.repeat(4))
            assert same_bits(await rank.broadcast(mine if rank.rank == 2 else torch.zeros_like(mine), 2), mine)
            assert same_bits(await rank.all_to_all(mine.repeat(4)), mine.repeat(4))
            if rank.rank == 0:
                await rank.send(mine, 3)
            if rank.rank == 3:
                assert same_bits(await rank.recv(torch.zeros_like(mine), 0), mine)

        await each_rank(four, work)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
async def test_sums_of_strange_floats_are_what_arithmetic_says(four: Ranks, dtype: torch.dtype) -> None:
    for elements in (1, 8, 4 * LIMITS.chunk_bytes // dtype.itemsize):
        value = torch.tensor([1.0, torch.inf, torch.nan, -0.0], dtype=dtype)
        mine = [value[rank].repeat(elements) for rank in range(4)]

        async def work(rank: Backend, mine: list[torch.Tensor] = mine) -> None:
            assert (await rank.all_reduce(mine[rank.rank])).isnan().all()
            finite = [mine[0], mine[1], mine[0], mine[3]][rank.rank]
            assert (await rank.all_reduce(finite)).isposinf().all()
            assert (await rank.all_reduce(finite, ReduceOp.MIN)).abs().sum() == 0
            assert (await rank.reduce_scatter(finite.repeat(4), ReduceOp.MAX)).isposinf().all()
            negative = await rank.all_reduce(mine[3])
            assert same_bits(negative, mine[3])  # −0.0 + −0.0

        await each_rank(four, work)


async def test_every_rank_has_the_same_bits(world: Ranks) -> None:
    """Sum random floats, whose sum depends on the order, with strange ones among them."""
    for dtype in FLOATS:
        for elements in (7, 129, 1000):
            random = torch.Generator().manual_seed(elements)
            whole = on_test_device(torch.randn(len(world), elements, generator=random, device="cpu")).to(dtype)
            whole[-1, : elements // 4] = strange(dtype, elements // 4)

            async def work(rank: Backend, whole: torch.Tensor = whole) -> bytes:
                mine = whole[rank.rank]
                return b"".join([bits(await rank.all_reduce(mine, op)) for op in ReduceOp if op.is_defined_for(mine.dtype)])

            assert len(set(await each_rank(world, work))) == 1


async def sums(ranks: Ranks, dtype: torch.dtype, elements: int) -> list[bytes]:
    """The bits of a reduction of random floats, by rank."""
    random = torch.Generator().manual_seed(3)
    whole = on_test_device(torch.randn(len(ranks), elements * len(ranks), generator=random, device="cpu")).to(dtype)

    async def work(rank: Backend) -> bytes:
        mine = whole[rank.rank]
        results = [rank.all_reduce(mine, ReduceOp.MEAN), rank.reduce_scatter(mine)]
        return b"".join([bits(await result) for result in results])

    return await each_rank(ranks, work)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_the_same_bits_every_time_and_on_every_backend(dtype: torch.dtype) -> None:
    """Only the ranks and their nodes determine the order of a sum, not timing, transport or the size of chunks. And it is the same for
    one node as for nodes of one rank."""
    for ranks, elements in ((2, 5), (3, 2), (3, 100), (4, 333)):
        seen = set()
        for kind in ("loopback", "shm", *ENGINES, "ring", "grpc", "gloo"):
            async with cluster(kind, ranks) as backends:
                seen |= {tuple(await sums(backends, dtype, elements)) for _ in range(5)}
        assert len(seen) == 1
    seen = set()
    for limits in (LIMITS, replace(LIMITS, chunk_bytes=128)):
        for make in (local_cluster, loopback_cluster):
            async with make(4, ranks_per_node=2, limits=limits) as backends:
                seen |= {tuple(await sums(backends, dtype, 333)) for _ in range(5)}
    for kind in ENGINES:
        async with cluster(kind, 4, ranks_per_node=2) as backends:
            seen |= {tuple(await sums(backends, dtype, 333)) for _ in range(5)}
    assert len(seen) == 1
    seen = set()
    for _ in range(2):
        async with cluster("hybrid", 5) as backends:
            seen |= {tuple(await sums(backends, dtype, 333)) for _ in range(5)}
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("kind", "elements", "way"), [("shm", 2, "letter"), ("shm", 333, "loan by letter"), ("streams", 333, "loan"), ("windows", 333, "piece")]
)
async def test_the_ways_inside_a_node_are_different_ones(kind: str, elements: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the test above would show less than it says."""
    ways = Counter[str]()
    for name, owner in {"letter": LetterRound, "loan by letter": LoanRound, "loan": Sharing, "piece": Window}.items():
        method = {"loan": "lend", "piece": "put"}.get(name, "_run")
        monkeypatch.setattr(owner, method, counting(ways, name, getattr(owner, method)))
    async with cluster(kind, 3) as backends:
        await sums(backends, torch.float32, elements)
    assert ways.keys() == {way}


def counting(ways: Counter[str], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*arguments: Any) -> Any:
        ways[name] += 1
        return function(*arguments)

    return counted


def test_16_bit_floats_are_summed_in_32(four: Ranks) -> None:
    """A running sum in bfloat16 would stay at 256, one in float16 at 2048."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        for elements in (1, 200):
            mine = [torch.full((elements,), value, dtype=dtype) for value in (large, 1.0, 1.0, 2.0)]
            handles = [rank.all_reduce(mine[rank.rank]) for rank in four]
            assert all((handle.wait() == large + 4).all() for handle in handles)


@pytest.mark.parametrize("per_node", [None, 1, 2])
@pytest.mark.parametrize("make", [loopback_cluster, local_cluster])
async def test_in_rank_order_a_sum_is_that_of_a_loop(make: MakeCluster, per_node: int | None) -> None:
    """This holds for any size and any placement on nodes. Without this option large sums are not in rank order."""
    differs = False
    for routing in (Routing.AUTO, Routing.RANK_ORDER):
        async with make(4, ranks_per_node=per_node, limits=LIMITS, routing=routing) as backends:
            for elements in (5, 40, 1000):
                random = torch.Generator().manual_seed(elements)
                whole = on_test_device(torch.randn(4, elements * 4, generator=random, device="cpu"))
                looped = whole[0] + whole[1] + whole[2] + whole[3]

                async def work(rank: Backend, whole: torch.Tensor = whole) -> tuple[torch.Tensor, torch.Tensor]:
                    return await rank.all_reduce(whole[rank.rank]), await rank.reduce_scatter(whole[rank.rank], ReduceOp.MEAN)

                for rank, (reduced, scattered) in enumerate(await each_rank(backends, work)):
                    same = same_bits(reduced, looped) and same_bits(scattered, looped.chunk(4)[rank] / 4)
                    assert same or routing is Routing.AUTO
                    differs |= not same
    assert differs, "this has shown nothing"
