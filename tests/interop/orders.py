"""Programs with groups whose ranks are not in ascending order; run by forked ranks. The expected results are gloo's."""

# torch's types do not know all that torch documents:
# mypy: disable-error-code="attr-defined, call-overload, no-untyped-call, arg-type, union-attr, assignment, call-arg"

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard, distribute_tensor

from tests.interop import programs

ORDERS = {2: [[1, 0]], 3: [[2, 0, 1], [2, 0], [2, 1]]}
Group = Any
Tensor = torch.Tensor


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on `world_size` ranks; return how many ranks failed."""
    return programs.launch(globals()[name], folder, int(world_size))


def as_with_gloo(rank: int, world_size: int, _: Path) -> None:
    for order in ORDERS[world_size]:
        groups = [dist.new_group(order, backend=backend, sort_ranks=False) for backend in ("shardnet", "gloo")]
        if rank in order:
            for call in CALLS:
                ours, theirs = (call(group, order) for group in groups)
                assert ours == theirs, (order, call.__name__, ours, theirs)
    dist.barrier()


def _numbers(group: Group, order: list[int]) -> object:
    return group.rank(), group.size(), dist.get_rank(group), dist.get_process_group_ranks(group)


def _sums(group: Group, order: list[int]) -> object:
    summed, reduced = _mine(), _mine()
    dist.all_reduce(summed, group=group)
    dist.reduce(reduced, dst=order[1], group=group)
    part, listed = torch.empty(2), torch.empty(2)
    dist.reduce_scatter_tensor(part, _blocks(order), group=group)
    dist.reduce_scatter(listed, list(_blocks(order).chunk(len(order))), group=group)
    return summed.tolist(), reduced.tolist() if dist.get_rank() == order[1] else None, part.tolist(), listed.tolist()


def _broadcasts(group: Group, order: list[int]) -> object:
    by_rank, by_place = _mine(), _mine()
    dist.broadcast(by_rank, src=order[0], group=group)
    dist.broadcast(by_place, group_src=1, group=group)
    return by_rank.tolist(), by_place.tolist()


def _gathers(group: Group, order: list[int]) -> object:
    parts, flat = [torch.empty(3) for _ in order], torch.empty(3 * len(order))
    dist.all_gather(parts, _mine(), group=group)
    dist.all_gather_into_tensor(flat, _mine(), group=group)
    polled = torch.empty(3 * len(order))
    work = dist.all_gather_into_tensor(polled, _mine(), group=group, async_op=True)
    while not work.is_completed():
        time.sleep(0.001)
    here = [torch.empty(3) for _ in order] if dist.get_rank() == order[1] else None
    dist.gather(_mine(), here, dst=order[1], group=group)
    told: list[object] = [None] * len(order)
    dist.all_gather_object(told, dist.get_rank(), group=group)
    return [each.tolist() for each in (*parts, flat, polled, *(here or []))], told


def _scatters(group: Group, order: list[int]) -> object:
    mine = torch.empty(2)
    dist.scatter(mine, list(_blocks(order).chunk(len(order))) if dist.get_rank() == order[0] else None, src=order[0], group=group)
    return mine.tolist()


def _exchanges(group: Group, order: list[int]) -> object:
    got, flat = [torch.empty(2) for _ in order], torch.empty(2 * len(order))
    dist.all_to_all(got, list(_blocks(order).chunk(len(order))), group=group)
    dist.all_to_all_single(flat, _blocks(order), group=group)
    place = group.rank()
    sends, receives = [each + 1 for each in range(len(order))], [place + 1] * len(order)
    uneven = torch.empty(sum(receives), 2)
    dist.all_to_all_single(uneven, torch.arange(2.0 * sum(sends)).view(-1, 2) + 100 * place, receives, sends, group=group)
    return [each.tolist() for each in (*got, flat, uneven)]


def _messages(group: Group, order: list[int]) -> object:
    """Messages from each rank to the next one, then from all others to the first one."""
    place, count = group.rank(), len(order)
    got = torch.empty(3)
    ops = [
        dist.P2POp(dist.isend, _mine(), group=group, group_peer=(place + 1) % count),
        dist.P2POp(dist.irecv, got, group=group, group_peer=(place - 1) % count),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    sources = []
    if place:
        dist.send(_mine(), dst=order[0], group=group, tag=3)
    else:
        whose = torch.empty(3)
        for _ in order[1:]:
            sources.append(dist.recv(whose, group=group, tag=3))
            assert whose.tolist() == [float(sources[-1])] * 3
    return got.tolist(), sorted(sources)


CALLS: list[Callable[[Group, list[int]], object]] = [_numbers, _sums, _broadcasts, _gathers, _scatters, _exchanges, _messages]


def _mine() -> Tensor:
    return torch.full((3,), float(dist.get_rank()))


def _blocks(order: list[int]) -> Tensor:
    """Two numbers for each rank of the group, different on each rank."""
    return torch.arange(2.0 * len(order)) + 10 * (dist.get_rank() + 1)


def uneven(rank: int, world_size: int, _: Path) -> None:
    """Lists of tensors of different sizes, which gloo does not take."""
    order = ORDERS[world_size][0]
    group = dist.new_group(order, sort_ranks=False)
    place = order.index(rank)
    parts = [torch.empty(each + 1) for each in range(world_size)]
    dist.all_gather(parts, torch.full((place + 1,), float(rank)), group=group)
    assert [each.tolist() for each in parts] == [[float(each)] * (index + 1) for index, each in enumerate(order)]
    mine = torch.empty(place + 1)
    dist.reduce_scatter(mine, [torch.full((each + 1,), float(each)) for each in range(world_size)], group=group)
    assert mine.tolist() == [float(place * world_size)] * (place + 1)
    strided = torch.zeros(3, world_size).t()
    dist.all_gather_into_tensor(strided, _mine(), group=group)
    assert strided.tolist() == [[float(each)] * 3 for each in order]


def inference(rank: int, world_size: int, _: Path) -> None:
    """Outputs that only inference mode may write. The caller is in that mode, but not the thread that puts blocks in order."""
    order = ORDERS[world_size][0]
    group = dist.new_group(order, sort_ranks=False)
    for _ in range(20):  # sometimes the caller is that thread
        with torch.inference_mode():
            gathered = torch.zeros(3 * world_size)
            dist.all_gather_into_tensor(gathered, _mine(), group=group)
            dist.all_gather([torch.zeros(3) for _ in order], _mine(), group=group)
        assert gathered[::3].tolist() == [float(each) for each in order]


def split(rank: int, world_size: int, _: Path) -> None:
    """Groups of groups, which gloo makes only of its own groups; and one group for each direction between two ranks, as in a pipeline."""
    everyone = [dist.new_group(list(range(world_size)), backend=backend) for backend in ("shardnet", "gloo")]
    for order in ORDERS[world_size]:
        ours, theirs = (dist.split_group(parent_pg=parent, split_ranks=[order]) for parent in everyone)
        assert (rank in order) == (ours is not dist.GroupMember.NON_GROUP_MEMBER)
        if rank in order:
            assert dist.get_group_rank(ours, rank) == ours.rank() == order.index(rank)
            for call in CALLS:
                assert call(ours, order) == call(theirs, order), (order, call.__name__)
    order = ORDERS[world_size][0]
    parent = dist.new_group(order, sort_ranks=False)
    alone = dist.split_group(parent_pg=parent, split_ranks=[[each] for each in range(world_size)], group_desc="alone")
    assert (alone.rank(), alone.size(), alone.group_desc) == (0, 1, "alone")
    assert dist.get_process_group_ranks(alone) == [rank]
    ends = [order[1], order[0]]  # ranks 1 and 0 of the parent
    edge = dist.split_group(parent_pg=parent, split_ranks=[[1, 0]])
    if rank in ends:
        assert dist.get_process_group_ranks(edge) == ends
        told = _mine()
        dist.broadcast(told, src=ends[0], group=edge)
        assert told.tolist() == [float(ends[0])] * 3
        alone.get_group_store().set("said", "here")
        assert alone.get_group_store().get("said") == b"here"
    dist.barrier()
    dist.destroy_process_group(edge)
    dist.barrier(parent)


def pipeline(rank: int, world_size: int, _: Path) -> None:
    """Each direction between two stages has a group of its own, split from the whole."""
    dist.config.pipeline_per_edge_p2p = True
    torch.manual_seed(7)
    layers = [torch.nn.Linear(4, 4) for _ in range(world_size)]
    batch, target = torch.randn(8, 4), torch.randn(8, 4)
    stage = PipelineStage(layers[rank], rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    losses: list[Tensor] = []
    schedule.step(*([batch] if rank == 0 else []), target=target, losses=losses)
    assert stage._p2p_edge_groups
    found = layers[rank].weight.grad.clone()
    layers[rank].zero_grad()
    torch.nn.functional.mse_loss(torch.nn.Sequential(*layers)(batch), target).backward()
    torch.testing.assert_close(found, layers[rank].weight.grad)


def meshes(rank: int, world_size: int, _: Path) -> None:
    order = ORDERS[world_size][0]
    mesh = DeviceMesh("cpu", order, preserve_rank_order=True)
    whole = torch.arange(2.0 * world_size)
    sharded = distribute_tensor(whole if rank == 0 else torch.zeros_like(whole), mesh, [Shard(0)], src_data_rank=order.index(0))
    place = order.index(rank)
    assert sharded.to_local().tolist() == whole[2 * place : 2 * place + 2].tolist()
    assert torch.equal(sharded.full_tensor(), whole)
