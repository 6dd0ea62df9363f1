"""The reference's results, as literal numbers."""

import asyncio
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardnet.backend import Backend, LoopbackBackend, ReduceOp, SubBackend
from shardnet.collectives.operation import Operation
from shardnet.errors import (
    DtypeError,
    InvalidRankError,
    InvalidWorldSizeError,
    SelfSendError,
    SizeMismatchError,
    UsageError,
)
from shardnet.pb.mesh_pb2 import Announcement
from shardnet.testing import each_rank
from tests.contract.conftest import MakeCluster

Ranks = Sequence[Backend]
T = torch.tensor


async def test_sum_and_mean_of_four(four: Ranks) -> None:
    async def work(rank: Backend) -> list[list[float]]:
        mine = torch.full((3,), float(rank.rank))
        return [(await rank.all_reduce(mine)).tolist(), (await rank.all_reduce(mine, ReduceOp.MEAN)).tolist()]

    assert await each_rank(four, work) == [[[6, 6, 6], [1.5, 1.5, 1.5]]] * 4


async def test_sum_and_mean_of_two(pair: Ranks) -> None:
    inputs = [T([1.0, 2.0, 3.0]), T([4.0, 5.0, 6.0])]

    async def work(rank: Backend) -> list[list[float]]:
        mine = inputs[rank.rank]
        ops = (ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
        return [(await rank.all_reduce(mine, op)).tolist() for op in ops]

    assert await each_rank(pair, work) == [[[5, 7, 9], [2.5, 3.5, 4.5], [1, 2, 3], [4, 5, 6], [4, 10, 18]]] * 2


async def test_all_gather(four: Ranks, pair: Ranks) -> None:
    gathered = await each_rank(four, lambda rank: rank.all_gather(T([10 * rank.rank, 10 * rank.rank + 1])))
    assert [each.tolist() for each in gathered] == [[0, 1, 10, 11, 20, 21, 30, 31]] * 4
    gathered = await each_rank(pair, lambda rank: rank.all_gather(torch.full((2, 3), rank.rank)))
    assert [each.tolist() for each in gathered] == [[[0] * 3] * 2 + [[1] * 3] * 2] * 2


async def test_reduce_scatter(four: Ranks, pair: Ranks) -> None:
    scattered = await each_rank(four, lambda rank: rank.reduce_scatter(T([1.0, 2.0, 3.0, 4.0])))
    assert [each.tolist() for each in scattered] == [[4.0], [8.0], [12.0], [16.0]]
    inputs = [T([1, 2, 3, 4]), T([5, 6, 7, 8])]
    scattered = await each_rank(pair, lambda rank: rank.reduce_scatter(inputs[rank.rank]))
    assert [each.tolist() for each in scattered] == [[6, 8], [10, 12]]
    scattered = await each_rank(pair, lambda rank: rank.reduce_scatter(torch.full((4,), float(rank.rank)), ReduceOp.MEAN))
    assert [each.tolist() for each in scattered] == [[0.5, 0.5], [0.5, 0.5]]


async def test_all_to_all(pair: Ranks) -> None:
    inputs = [T([10, 20, 30, 40]), T([50, 60, 70, 80])]
    exchanged = await each_rank(pair, lambda rank: rank.all_to_all(inputs[rank.rank]))
    assert [each.tolist() for each in exchanged] == [[10, 20, 50, 60], [30, 40, 70, 80]]


async def test_uneven_all_to_all(pair: Ranks) -> None:
    inputs = [T([10, 20, 21, 22]), T([30, 31, 40, 41])]
    sends, receives = [[1, 3], [2, 2]], [[1, 2], [3, 2]]
    exchanged = await each_rank(
        pair,
        lambda rank: rank.all_to_all(inputs[rank.rank], send_sizes=sends[rank.rank], recv_sizes=receives[rank.rank]),
    )
    assert [each.tolist() for each in exchanged] == [[10, 30, 31], [20, 21, 22, 40, 41]]


async def test_mean_of_unit_vectors_is_a_third(fresh: MakeCluster) -> None:
    async with fresh(3) as ranks:
        means = await each_rank(ranks, lambda rank: rank.all_reduce(torch.eye(3)[rank.rank], ReduceOp.MEAN))
        assert all(torch.equal(mean, torch.full((3,), 1 / 3)) for mean in means)


async def test_send_and_receive(pair: Ranks) -> None:
    async def work(rank: Backend) -> list[int]:
        other = 1 - rank.rank
        sent, received = rank.send(T([rank.rank, 7]), other), rank.recv(torch.empty(2, dtype=torch.int64), other)
        await sent
        return (await received).tolist()

    assert await each_rank(pair, work) == [[1, 7], [0, 7]]


@pytest.mark.parametrize("first", [0, 1])
async def test_size_of_a_receive(pair: Ranks, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends are told, whichever notices first, and the next message between them arrives."""
    text, tag = "rank 0 sends 3 elements, but the tensor of rank 1 has 4; give both tensors the same number", f"seen by {first}"
    cleared = Operation.cleared

    async def cleared_late(op: Operation, peer: int) -> Announcement:
        theirs = await cleared(op, peer)
        if tag in op.group.party.channel and op.sequence == 0 and op.group.rank != first:
            await asyncio.Event().wait()
        return theirs

    monkeypatch.setattr(Operation, "cleared", cleared_late)

    async def work(rank: Backend) -> list[int]:
        if rank.rank == 0:
            with pytest.raises(SizeMismatchError, match=rf"\[rank 0/2 .* send .*{text}") as caught:
                await rank.send(torch.zeros(3), 1, tag=tag)
            assert (caught.value.expected, caught.value.got) == (4, 3)
            await rank.send(T([1, 2]), 1, tag=tag)
            return []
        with pytest.raises(SizeMismatchError, match=rf"\[rank 1/2 .* recv .*{text}") as caught:
            await rank.recv(torch.zeros(4), 0, tag=tag)
        assert (caught.value.expected, caught.value.got) == (4, 3)
        return (await rank.recv(torch.zeros(2, dtype=torch.int64), 0, tag=tag)).tolist()

    assert (await each_rank(pair, work))[1] == [1, 2]


def test_world_size_of_a_loopback_group() -> None:
    for size in (0, -1):
        with pytest.raises(InvalidWorldSizeError, match=f"got {size}"):
            LoopbackBackend.create_group(size)


async def test_ranks_out_of_range(world: Ranks) -> None:
    size = len(world)
    for rank in world:
        assert (rank.rank, rank.world_size) == (world.index(rank), size)
        for wrong in (-1, size, size + 5):
            x = torch.zeros(1)
            calls: list[Callable[[], object]] = [partial(rank.broadcast, x, wrong), partial(rank.subgroup, [rank.rank, wrong])]
            calls += [partial(rank.send, x, wrong), partial(rank.recv, x, wrong)]
            for call in calls:
                with pytest.raises(InvalidRankError, match=f"rank {wrong} is not in") as caught:
                    call()
                assert (caught.value.rank, caught.value.world_size) == (wrong, size)


async def test_no_sending_to_oneself(world: Ranks) -> None:
    for rank in world:
        for send in (True, False):
            call = rank.send if send else rank.recv
            with pytest.raises(SelfSendError, match=f"rank {rank.rank} cannot send") as caught:
                call(torch.zeros(1), rank.rank)
            assert caught.value.rank == rank.rank


async def test_wrong_sizes_are_refused_before_any_traffic(world: Ranks) -> None:
    """Even if only one rank makes the call: nothing is sent, no sequence number is used up, and the next collective is right."""
    size, rank = len(world), world[0]
    before = rank.telemetry.bytes_sent
    wrong: list[tuple[Callable[[], object], str]] = [
        (
            lambda: rank.all_gather(torch.zeros(2), sizes=[2] * (size + 1)),
            f"expected {size} entries in the list of sizes but got {size + 1}",
        ),
        (
            lambda: rank.all_gather(torch.zeros(2), sizes=[3] * size),
            r"expected 3 rows in the tensor of rank 0 \(its entry in `sizes`\) but got 2",
        ),
        (lambda: rank.reduce_scatter(torch.zeros(size), sizes=[2] * size), f"expected {2 * size} rows to scatter"),
        (lambda: rank.reduce_scatter(torch.tensor(1.0)), "at least 1 dimension"),
        (
            lambda: rank.reduce_scatter_pieces([torch.zeros(size), torch.zeros(999)], sizes=[2] * size),
            f"expected {2 * size} rows to scatter",
        ),
        (lambda: rank.all_to_all(torch.zeros(size), send_sizes=[1] * size, recv_sizes=[1] * (size - 1)), f"expected {size} entries"),
        (lambda: rank.all_to_all(torch.zeros(size + 1), send_sizes=[1] * size, recv_sizes=[1] * size), f"expected {size} rows to exchange"),
        (
            lambda: rank.all_to_all(torch.zeros(size), send_sizes=[1] * size, recv_sizes=[2] * size),
            "expected 1 rows from this rank to itself",
        ),
        (lambda: rank.all_reduce(torch.zeros(3), out=torch.zeros(2)), "expected 3 elements in `out` but got 2"),
        (lambda: rank.all_reduce(torch.zeros(3), out=torch.zeros(3).double()), "expected float32 as dtype of `out` but got float64"),
        (lambda: rank.all_gather(torch.zeros(2), out=torch.zeros(2 * size + 1)), f"expected {2 * size} elements in `out`"),
    ]
    if size > 1:
        wrong += [
            (lambda: rank.reduce_scatter(torch.zeros(size + 1)), f"expected a multiple of {size} rows to scatter"),
            (lambda: rank.all_to_all(torch.zeros(size + 1)), f"expected a multiple of {size} rows to exchange"),
        ]
    for call, text in wrong:
        with pytest.raises(SizeMismatchError, match=text):
            call()
    with pytest.raises(UsageError, match="must not be negative"):
        rank.all_gather(torch.zeros(0), sizes=[0] * (size - 1) + [-1])
    with pytest.raises(UsageError, match="at least one tensor, got none"):
        rank.reduce_scatter_pieces([])
    with pytest.raises(UsageError, match=r"one dtype .*float64"):
        rank.reduce_scatter_pieces([torch.zeros(size), torch.zeros(size).double()])
    with pytest.raises(UsageError, match="both send_sizes and recv_sizes"):
        rank.all_to_all(torch.zeros(size), send_sizes=[1] * size)
    turned, other = torch.zeros(2, 2).t(), (rank.rank + 1) % size
    strided: list[tuple[Callable[[], object], str]] = [
        (lambda: rank.all_reduce(torch.zeros(2, 2), out=turned), "`out`"),
        (lambda: rank.broadcast_on_node(turned, 0), "`tensor`"),
        (lambda: rank.recv(turned, other), "`into`"),
        (lambda: rank.recv_any(turned), "`into`"),
    ]
    for call, name in strided:
        with pytest.raises(UsageError, match=f"^{name} must be contiguous, got a tensor that is not"):
            call()
    assert rank.telemetry.bytes_sent == before
    await each_rank(world, lambda each: each.barrier())


async def test_values_of_the_wrong_kind(world: Ranks) -> None:
    """The call refuses them, before any traffic."""
    rank, before, one = world[0], world[0].telemetry.bytes_sent, torch.zeros(1)
    other = 1 % rank.world_size
    wrong: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], str]] = [
        (rank.all_reduce, ([1.0],), {}, "`tensor` must be a torch.Tensor, got a value of type list"),
        (rank.all_gather, (None,), {}, "`tensor` must be a torch.Tensor, got a value of type NoneType"),
        (rank.broadcast, ("x", 0), {}, "`tensor` must be a torch.Tensor, got a value of type str"),
        (rank.all_gather, (one,), {"out": [0]}, "`out` must be a torch.Tensor, got a value of type list"),
        (rank.recv_any, ([0],), {}, "`into` must be a torch.Tensor, got a value of type list"),
        (rank.reduce_scatter_pieces, ([[1.0]],), {}, "`piece` must be a torch.Tensor, got a value of type list"),
        (rank.all_reduce, (torch.eye(2).to_sparse(),), {}, "`tensor` must be dense, got layout torch.sparse_coo"),
        (rank.all_reduce, (one, "sum"), {}, "`op` must be a ReduceOp of shardnet, such as ReduceOp.SUM, got 'sum'"),
        (rank.reduce_scatter, (one, dist.ReduceOp.SUM), {}, "`op` must be a ReduceOp of shardnet, such as ReduceOp.SUM, got <RedOp"),
        (rank.broadcast, (one, 0.5), {}, "a broadcast root must be a rank, from 0 to"),
        (rank.send, (one, "1"), {}, "a peer must be a rank, from 0 to .*, got '1'"),
        (rank.subgroup, (0,), {}, r"members of a sub-group must be a list of ranks, such as \[0, 2\], got 0"),
        (rank.subgroup, ([0.0],), {}, "a sub-group member must be a rank, from 0 to .*, got 0.0"),
    ]
    if rank.world_size > 1:
        for timeout_s in ("5", -1, 0, math.nan, math.inf):
            wrong += [
                (rank.barrier, (), {"timeout_s": timeout_s}, "`timeout_s` must be a finite number of seconds above 0, got"),
                (rank.recv, (one, other), {"timeout_s": timeout_s}, "`timeout_s` must be a finite number of seconds above 0, got"),
            ]
    for call, arguments, options, text in wrong:
        with pytest.raises(UsageError, match=text):
            call(*arguments, **options)
    assert rank.telemetry.bytes_sent == before
    await each_rank(world, lambda each: each.barrier())


async def test_dtypes_that_cannot_be(world: Ranks) -> None:
    with pytest.raises(DtypeError, match="complex64 tensors cannot be sent; supported: float64, float32"):
        world[0].all_gather(torch.zeros(1, dtype=torch.complex64))
    for dtype in (torch.int64, torch.uint8, torch.bool):
        with pytest.raises(DtypeError, match=r"mean of .* is not defined: reduce with SUM"):
            world[0].all_reduce(torch.zeros(1, dtype=dtype), ReduceOp.MEAN)


async def test_alone(fresh: MakeCluster) -> None:
    async with fresh(1) as (rank,):
        assert (await rank.all_reduce(T([1.0, 2.0]), ReduceOp.MEAN)).tolist() == [1, 2]
        assert (await rank.broadcast(T([3]), 0)).tolist() == [3]
        assert (await rank.all_gather(T([[1, 2]]))).tolist() == [[1, 2]]
        assert (await rank.reduce_scatter(T([5.0, 6.0]))).tolist() == [5, 6]
        assert (await rank.all_to_all(T([7, 8]))).tolist() == [7, 8]
        await rank.barrier()
        assert rank.subgroup([0]).world_size == 1
        assert rank.telemetry.bytes_sent == 0


async def test_empty_rows_are_gathered_without_traffic(world: Ranks) -> None:
    before = [rank.telemetry.bytes_sent for rank in world]
    gathered = await each_rank(world, lambda rank: rank.all_gather(torch.zeros(0, 3)))
    assert [each.shape for each in gathered] == [(0, 3)] * len(world)
    assert [rank.telemetry.bytes_sent for rank in world] == before


async def test_subgroup_of_four(four: Ranks) -> None:
    one, three = four[1].subgroup([1, 3]), four[3].subgroup([3, 1])
    assert isinstance(one, SubBackend)
    assert isinstance(three, SubBackend)
    assert (one.rank, three.rank, one.world_size) == (0, 1, 2)
    assert [one.to_local(rank) for rank in range(4)] == [None, 0, None, 1]
    words = "rank 0 of 4 is not a member of the sub-group [1, 3]; call subgroup() on its members only"
    with pytest.raises(InvalidRankError, match=f"^{re.escape(words)}$") as caught:
        four[0].subgroup([1, 3])
    assert (caught.value.rank, caught.value.world_size) == (0, 4)
    with pytest.raises(InvalidWorldSizeError, match="at least one member"):
        four[0].subgroup([])
    sums = await each_rank([one, three], lambda rank: rank.all_reduce(T([rank.rank + 1])))
    assert [each.tolist() for each in sums] == [[3], [3]]


async def test_members_are_sorted_and_counted_once(four: Ranks) -> None:
    groups = [four[rank].subgroup([3, 2, 0, 2, 3]) for rank in (0, 2, 3)]
    assert [(group.rank, group.world_size) for group in groups] == [(0, 3), (1, 3), (2, 3)]
    assert isinstance(groups[1], SubBackend)
    assert groups[1].members == (0, 2, 3)


async def test_translation_of_ranks(four: Ranks) -> None:
    group, *_ = (four[rank].subgroup([1, 2, 3]) for rank in (1, 2, 3))
    assert isinstance(group, SubBackend)
    assert [group.to_global(local) for local in range(3)] == [1, 2, 3]
    assert group.to_local(0) is None
    for wrong in (-1, 3):
        with pytest.raises(InvalidRankError):
            group.to_global(wrong)


async def test_barrier_of_every_second_rank(fresh: MakeCluster) -> None:
    async with fresh(6) as ranks:
        groups = [ranks[rank].subgroup([0, 2, 4]) for rank in (0, 2, 4)]
        await each_rank(groups, lambda rank: rank.barrier())
