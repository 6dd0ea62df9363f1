"""Every collective with every dtype, at the sizes where the algorithm changes, against plain torch.

The values are small whole numbers, so that sums are exact in every dtype and any order.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending, ReduceOp
from shardnet.testing import each_rank, reference, same_bits
from tests.contract.conftest import ENGINES, LIMITS, SIZES, name_of

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
# For gRPC, which only sees bytes, one dtype of each way of summing.
MATRIX = [(("loopback", ranks), dtype) for ranks in (1, 2, 3, 4, 5) for dtype in DTYPES]
BYTES = (torch.float32, torch.bfloat16, torch.int8)
MATRIX += [
    ((kind, ranks), dtype)
    for kind in ("shm", "ring", "grpc", "nodes", "gloo", "hybrid")
    for ranks in SIZES.get(kind, (2, 3, 4))
    if ranks > 1
    for dtype in BYTES
]
MATRIX += [((kind, 3), dtype) for kind in ENGINES for dtype in BYTES]
Tensor = torch.Tensor


@dataclass
class Case:
    """One collective: the call, its inputs and the results that must come, by rank."""

    op: str
    inputs: list[Tensor]
    expected: list[Tensor]
    arguments: dict[str, Any] = field(default_factory=dict)

    def start(self, backend: Backend, mine: Tensor) -> Pending[Tensor]:
        arguments = self.arguments
        if "table" in arguments:  # rows from each rank to each other
            table, rank = arguments["table"], backend.rank
            arguments = {"send_sizes": table[rank], "recv_sizes": [row[rank] for row in table]}
        pending: Pending[Tensor] = getattr(backend, self.op)(mine, **arguments)
        return pending


def sample(dtype: torch.dtype, shape: Sequence[int], rank: int) -> Tensor:
    numbers = torch.arange(torch.Size(shape).numel()) * 7 + rank * 3
    return (numbers % (2 if dtype is torch.bool else 11)).to(dtype).reshape(tuple(shape))


def block_sizes(dtype: torch.dtype) -> list[int]:
    """How many elements a rank sends to each other: around the eager limit, around a chunk's size, and some chunks more."""
    eager, chunk = LIMITS.eager_bytes // dtype.itemsize, LIMITS.chunk_bytes // dtype.itemsize
    return [0, 1, eager - 1, eager, eager + 1, chunk, 2 * chunk + 1]


def whole_sizes(dtype: torch.dtype, ranks: int) -> list[int]:
    """How many elements for data that is cut over the ranks, or not cut at all."""
    eager, chunk = LIMITS.eager_bytes // dtype.itemsize, LIMITS.chunk_bytes // dtype.itemsize
    direct = 2 * eager // ranks  # the largest all_reduce in one step
    return sorted({0, 1, ranks - 1, ranks + 1, direct, direct + 1, eager, eager + 1, eager * ranks + 1, 2 * chunk * ranks + 1})


def cases(dtype: torch.dtype, ranks: int) -> list[Case]:
    ops = [op for op in ReduceOp if op.is_defined_for(dtype)]
    found = [case for seed in range(4) for case in uneven(dtype, ranks, seed)]
    for size in whole_sizes(dtype, ranks):
        flat = [sample(dtype, (size,), rank) for rank in range(ranks)]
        root = size % ranks
        found.append(Case("broadcast", flat, reference.broadcast(flat, root), {"root": root}))
        found += [Case("all_reduce", flat, reference.all_reduce(flat, op), {"op": op}) for op in ops]
    for shape in [(size,) for size in block_sizes(dtype)] + [(0, 3), (2, 3, 2)]:
        mine = [sample(dtype, shape, rank) for rank in range(ranks)]
        whole = [sample(dtype, (shape[0] * ranks, *shape[1:]), rank) for rank in range(ranks)]
        found.append(Case("all_gather", mine, reference.all_gather(mine)))
        found.append(Case("all_to_all", whole, reference.all_to_all(whole)))
        found += [Case("reduce_scatter", whole, reference.reduce_scatter(whole, op), {"op": op}) for op in ops]
    return found


def uneven(dtype: torch.dtype, ranks: int, seed: int) -> list[Case]:
    """The uneven forms, with seeded random sizes; some ranks have nothing."""
    choose = random.Random(seed)
    most = 3 * LIMITS.chunk_bytes // dtype.itemsize if seed % 2 else 5
    sizes = [choose.choice((0, 1, choose.randint(0, most))) for _ in range(ranks)]
    own = [sample(dtype, (size, 2), rank) for rank, size in enumerate(sizes)]
    whole = [sample(dtype, (sum(sizes), 2), rank) for rank in range(ranks)]
    table = [[choose.choice((0, 1, choose.randint(0, most))) for _ in range(ranks)] for _ in range(ranks)]
    rows = [sample(dtype, (sum(table[rank]),), rank) for rank in range(ranks)]
    return [
        Case("all_gather", own, reference.all_gather(own), {"sizes": sizes}),
        Case("reduce_scatter", whole, reference.reduce_scatter(whole, ReduceOp.SUM, sizes), {"sizes": sizes}),
        Case("all_to_all", rows, reference.all_to_all(rows, table), {"table": table}),
    ]


@pytest.mark.parametrize(("world", "dtype"), MATRIX, indirect=["world"], ids=name_of)
async def test_everything(world: Sequence[Backend], dtype: torch.dtype) -> None:
    """All of them under way at once."""
    wanted = cases(dtype, len(world))
    inputs = [[each.clone() for each in case.inputs] for case in wanted]

    async def work(rank: Backend) -> None:
        handles = [case.start(rank, given[rank.rank]) for case, given in zip(wanted, inputs, strict=True)]
        for case, handle in zip(wanted, handles, strict=True):
            got = await handle
            assert same_bits(got, case.expected[rank.rank]), f"{case} on rank {rank.rank}: got {got}"

    await each_rank(world, work)
    for case, given in zip(wanted, inputs, strict=True):
        assert all(map(same_bits, given, case.inputs)), f"{case} changed its input"


async def test_zero_dimensions(world: Sequence[Backend]) -> None:
    ranks = len(world)

    async def work(rank: Backend) -> None:
        mine = torch.tensor(float(rank.rank))
        assert same_bits(await rank.all_reduce(mine), torch.tensor(float(sum(range(ranks)))))
        assert same_bits(await rank.broadcast(mine, ranks - 1), torch.tensor(ranks - 1.0))
        assert same_bits(await rank.all_gather(mine), torch.arange(ranks, dtype=torch.float32))

    await each_rank(world, work)


async def test_inputs_that_are_not_contiguous(world: Sequence[Backend]) -> None:
    """Transposed, strided and expanded."""
    ranks = len(world)
    square = [sample(torch.float32, (4 * ranks, 4 * ranks), rank) for rank in range(ranks)]

    async def work(rank: Backend) -> None:
        turned = square[rank.rank].t()
        assert same_bits(await rank.all_reduce(turned), reference.all_reduce([each.t() for each in square])[0])
        assert same_bits(await rank.all_gather(turned), reference.all_gather([each.t() for each in square])[0])
        assert same_bits(await rank.reduce_scatter(turned), reference.reduce_scatter([each.t() for each in square])[rank.rank])
        assert same_bits(await rank.broadcast(turned, 0), square[0].t())
        assert same_bits(await rank.all_to_all(turned[:, ::3]), reference.all_to_all([each.t()[:, ::3] for each in square])[rank.rank])
        spread = torch.tensor([rank.rank + 1.0]).expand(100)
        assert same_bits(await rank.all_reduce(spread), torch.full((100,), ranks * (ranks + 1) / 2))

    await each_rank(world, work)


async def test_parameters_can_be_given(world: Sequence[Backend]) -> None:
    """The value of a tensor that requires grad is used; results have no autograd history."""

    async def work(rank: Backend) -> None:
        got = await rank.all_reduce(torch.nn.Parameter(torch.ones(3)))
        assert same_bits(got, torch.full((3,), float(len(world))))
        assert not got.requires_grad

    await each_rank(world, work)


async def test_pieces(world: Sequence[Backend]) -> None:
    """Pieces of any shape, strides and size, which each rank cuts differently or not at all: it is the same collective."""
    ranks = len(world)
    sizes = [0] + [40 + rank for rank in range(1, ranks)] if ranks > 1 else [40]
    whole = [sample(torch.float32, (sum(sizes),), rank) for rank in range(ranks)]

    def cut(flat: torch.Tensor, rank: int) -> list[torch.Tensor]:
        first, second, rest = flat[:6], flat[6:26], flat[26:]
        return [
            [first.view(2, 3), rest[:0], second.view(4, 5).t().contiguous().t(), *torch.split(rest, 1)],
            [flat],
            list(torch.split(flat, 7)),
        ][rank % 3]

    for op in (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MAX):
        wanted = reference.reduce_scatter(whole, op, sizes)

        async def work(rank: Backend, op: ReduceOp = op, wanted: list[torch.Tensor] = wanted) -> None:
            pieces = cut(whole[rank.rank].clone(), rank.rank)
            assert same_bits(await rank.reduce_scatter_pieces(pieces, op, sizes=sizes), wanted[rank.rank])
            assert same_bits(await rank.all_reduce_pieces(pieces, op), reference.all_reduce(whole, op)[rank.rank])
            if rank.rank % 3 == 1:
                got = await rank.reduce_scatter(whole[rank.rank], op, sizes=sizes)
            else:
                got = await rank.reduce_scatter_pieces(pieces, op, sizes=sizes)
            assert same_bits(got, wanted[rank.rank])

        await each_rank(world, work)
