"""Which memory a collective reads and writes, and until when."""

import asyncio
import gc
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from shardnet.backend import Backend, ReduceOp
from shardnet.testing import each_rank, reference, same_bits

Ranks = Sequence[Backend]
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
SIZES = (1, 5, 150)  # elements per rank: sent directly, directly or in parts, in many chunks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
async def test_into_a_given_tensor(world: Ranks, dtype: torch.dtype, size: int) -> None:
    ranks = len(world)
    flat = [torch.arange(size).to(dtype) % 5 + rank for rank in range(ranks)]
    whole = [torch.arange(size * ranks).to(dtype) % 5 + rank for rank in range(ranks)]

    async def work(rank: Backend) -> None:
        r = rank.rank
        for start, expected in (
            (partial(rank.all_reduce, flat[r]), reference.all_reduce(flat)[r]),
            (partial(rank.broadcast, flat[r], 0), flat[0]),
            (partial(rank.all_gather, flat[r]), reference.all_gather(flat)[r]),
            (partial(rank.reduce_scatter, whole[r]), reference.reduce_scatter(whole)[r]),
        ):
            out = torch.full_like(expected, 77)
            got = await start(out=out)
            assert got.data_ptr() == out.data_ptr()
            assert same_bits(out, expected)

    before = [each.clone() for each in (*flat, *whole)]
    await each_rank(world, work)
    assert all(map(same_bits, (*flat, *whole), before))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
async def test_in_place(world: Ranks, dtype: torch.dtype, size: int) -> None:
    ranks = len(world)
    flat = [torch.arange(size).to(dtype) % 5 + rank for rank in range(ranks)]

    async def work(rank: Backend) -> None:
        for op in (ReduceOp.SUM, ReduceOp.MAX):
            mine = flat[rank.rank].clone()
            await rank.all_reduce(mine, op, out=mine)
            assert same_bits(mine, reference.all_reduce(flat, op)[0])
        mine = flat[rank.rank].clone()
        await rank.broadcast(mine, ranks - 1, out=mine)
        assert same_bits(mine, flat[-1])

    await each_rank(world, work)


@pytest.mark.parametrize("size", SIZES)
async def test_gathering_ones_own_slice(world: Ranks, size: int) -> None:
    """The input is already where it belongs, also when the shares differ."""
    for sizes in ([size] * len(world), [size + rank for rank in range(len(world))]):
        shares = [torch.full((rows, 2), float(rank)) for rank, rows in enumerate(sizes)]

        async def work(rank: Backend, sizes: list[int] = sizes, shares: list[torch.Tensor] = shares) -> None:
            out = torch.full((sum(sizes), 2), -1.0)
            mine = torch.split(out, sizes)[rank.rank]
            mine.copy_(shares[rank.rank])
            got = await rank.all_gather(mine, sizes=sizes, out=out)
            assert got.data_ptr() == out.data_ptr()
            assert same_bits(out, torch.cat(shares))

        await each_rank(world, work)


async def test_gathering_from_elsewhere_in_the_result(four: Ranks) -> None:
    """An input that overlaps its place in the result, but does not match it, is moved there."""
    for size in SIZES:

        async def work(rank: Backend, size: int = size) -> None:
            out = torch.full((4 * size,), -1.0)
            start = rank.rank * size + (1 if rank.rank == 0 else -1)
            mine = out[start : start + size]
            mine.copy_(torch.arange(size) + rank.rank * 1000.0)
            await rank.all_gather(mine, out=out)
            assert same_bits(out, torch.cat([torch.arange(size) + r * 1000.0 for r in range(4)]))

        await each_rank(four, work)


async def test_reducing_into_ones_own_slice(world: Ranks) -> None:
    for size in SIZES:
        whole = [torch.arange(size * len(world)) % 7 + rank for rank in range(len(world))]

        async def work(rank: Backend, size: int = size, whole: list[torch.Tensor] = whole) -> None:
            mine = whole[rank.rank].clone()
            place = mine[rank.rank * size : (rank.rank + 1) * size]
            await rank.reduce_scatter(mine, out=place)
            assert same_bits(place, reference.reduce_scatter(whole)[rank.rank])

        await each_rank(world, work)


async def test_reducing_into_what_overlaps_the_input(four: Ranks) -> None:
    """The result is not where its own elements are, but in another rank's slice, or shifted. Each rank's input must outlive its result."""
    for size in SIZES:
        whole = [torch.arange(size * 4) % 7 + rank for rank in range(4)]
        for shift in range(4):

            async def work(rank: Backend, size: int = size, whole: list[torch.Tensor] = whole, shift: int = shift) -> None:
                mine = whole[rank.rank].clone()
                place = mine[shift * size : (shift + 1) * size]
                await rank.reduce_scatter(mine, out=place)
                assert same_bits(place, reference.reduce_scatter(whole)[rank.rank])
                memory = torch.cat([whole[rank.rank], torch.zeros(4, dtype=torch.int64)])
                shifted = memory[shift : shift + 4 * size]
                await rank.all_reduce(memory[: 4 * size], out=shifted)
                assert same_bits(shifted, reference.all_reduce(whole)[0])

            await each_rank(four, work)


async def test_results_are_independent(world: Ranks) -> None:
    """A result has memory of its own: writing into it changes neither the input nor another result."""

    async def work(rank: Backend) -> None:
        mine = torch.ones(3)
        first, second = await rank.all_reduce(mine), await rank.all_reduce(mine)
        gathered, shared = await rank.all_gather(mine), await rank.broadcast(mine, 0)
        for result in (first, gathered, shared):
            result.fill_(9.0)
        assert same_bits(mine, torch.ones(3))
        assert same_bits(second, torch.full((3,), float(len(world))))

    await each_rank(world, work)


async def test_out_of_another_shape_keeps_it(pair: Ranks) -> None:
    """Only the number of elements counts: a flat buffer takes a matrix."""

    async def work(rank: Backend) -> None:
        out = torch.zeros(6)
        assert (await rank.all_reduce(torch.ones(2, 3), out=out)).shape == (6,)
        assert out.tolist() == [2] * 6

    await each_rank(pair, work)


async def test_a_parameter_as_out(pair: Ranks) -> None:
    """It is filled in place, without autograd noticing."""

    async def work(rank: Backend) -> None:
        out = torch.nn.Parameter(torch.zeros(3))
        await rank.broadcast(torch.full((3,), float(rank.rank)), 1, out=out)
        assert out.tolist() == [1, 1, 1]
        assert out.requires_grad

    await each_rank(pair, work)


@pytest.mark.parametrize("size", SIZES)
async def test_nothing_keeps_them_when_it_has_ended(world: Ranks, size: int) -> None:
    """Not even until Python's collector runs: gradients of several steps would be in memory until then."""
    traces = list[StorageWeakRef]()

    async def work(rank: Backend) -> None:
        flat, whole = torch.ones(size), torch.ones(size * len(world))
        outs = [
            await rank.all_reduce(flat),
            await rank.all_gather(flat),
            await rank.reduce_scatter(whole),
            await rank.broadcast(flat, 0),
            await rank.all_to_all(whole),
            *await asyncio.gather(rank.all_reduce(whole), rank.all_reduce(flat, ReduceOp.MAX)),
        ]
        traces.extend(StorageWeakRef(tensor.untyped_storage()) for tensor in (flat, whole, *outs))  # type: ignore[no-untyped-call]
        await rank.barrier()

    gc.collect()
    gc.disable()
    try:
        await each_rank(world, work)
        async with asyncio.timeout(5.0):  # other threads may hold the last one for a moment
            while not all(trace.expired() for trace in traces):  # type: ignore[no-untyped-call]
                await each_rank(world, lambda rank: rank.barrier())
    finally:
        gc.enable()
