"""Programs that call methods of a group rather than functions of torch.distributed; run by forked ranks."""

# mypy: disable-error-code="assignment, attr-defined, call-overload, call-arg, no-untyped-call, arg-type, union-attr"

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.interop import programs

SOON = timedelta(seconds=20)


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on `world_size` ranks; return how many ranks failed."""
    return programs.launch(globals()[name], folder, int(world_size))


def forms(rank: int, world_size: int, _: Path) -> None:
    """Every form that torch documents."""
    group, ranks = dist.group.WORLD, range(world_size)
    assert group is not None
    total, last = float(sum(each + 1 for each in ranks)), world_size - 1
    mine = lambda: torch.full((2,), rank + 1.0)  # noqa: E731
    for tensor, arguments, named, want in (
        (mine(), (), {}, total),
        (mine(), (dist.ReduceOp.MAX,), {}, world_size),
        (mine(), (dist.ReduceOp.MAX, SOON), {}, world_size),
        (mine(), (), {"op": dist.ReduceOp.MIN, "timeout": SOON}, 1),
    ):
        group.allreduce(tensor, *arguments, **named).wait()
        listed = mine()
        group.allreduce([listed], *arguments, **named).wait()
        assert tensor.tolist() == listed.tolist() == [want] * 2, (arguments, named)
    group.allreduce(tensor=tensor, op=dist.ReduceOp(dist.ReduceOp.MAX)).wait()
    for arguments, named in (((1,), {}), ((1, SOON), {}), ((), {"root": 1}), ((), {"root": 1, "timeout": SOON})):
        tensor = mine()
        group.broadcast(tensor, *arguments, **named).wait()
        assert tensor.tolist() == [2.0] * 2
    for arguments, named, want in (((0,), {}, total), ((0, dist.ReduceOp.MAX), {}, world_size), ((), {"root": 0, "timeout": SOON}, total)):
        tensor = mine()
        group.reduce(tensor, *arguments, **named).wait()
        assert tensor.tolist() == [want if rank == 0 else rank + 1.0] * 2
    rows = [torch.empty(2) for _ in ranks]
    group.allgather(rows, mine(), timeout=SOON).wait()
    assert [row.tolist() for row in rows] == [[each + 1.0] * 2 for each in ranks]
    group.gather([row.zero_() for row in rows] if rank == last else [], mine(), last).wait()
    assert [row.tolist() for row in rows] == [[each + 1.0] * 2 for each in ranks]
    flat = torch.zeros(2 * world_size if rank == last else 0)
    group.gather_single(flat, mine(), root=last).wait()
    assert flat.tolist() == ([each + 1.0 for each in ranks for _ in range(2)] if rank == last else [])
    tensor = torch.empty(2)
    group.scatter(tensor, [torch.full((2,), each + 5.0) for each in ranks] if rank == last else [], root=last).wait()
    assert tensor.tolist() == [rank + 5.0] * 2
    group.scatter(output_tensor=tensor, input_tensors=[mine() for _ in ranks] if rank == 0 else [], root=0).wait()
    assert tensor.tolist() == [1.0] * 2
    group.reduce_scatter(tensor, [mine() for _ in ranks], dist.ReduceOp.MAX).wait()
    assert tensor.tolist() == [world_size] * 2
    group.reduce_scatter(output=tensor, input=[mine() for _ in ranks]).wait()
    assert tensor.tolist() == [total] * 2
    swapped = torch.empty(world_size)
    group.alltoall_base(swapped, torch.arange(float(world_size)) + rank, [], [], timeout=SOON).wait()
    assert swapped.tolist() == [float(rank + each) for each in ranks]
    group.barrier().wait()
    group.barrier(SOON).wait()
    group.barrier(timeout=SOON).wait()


def facts(rank: int, world_size: int, _: Path) -> None:
    """Properties that torch's own code and frameworks read from a group."""
    group = dist.group.WORLD
    assert group is not None
    part = group._get_backend(torch.device("cpu"))
    assert part.options._timeout == programs.TIMEOUT
    part._set_default_timeout(SOON)
    assert part.options._timeout == SOON
    carries: object = dist.distributed_c10d.get_backend_impl()
    assert carries is group
    assert (group.supports_reconfigure, group.supports_window, group.supports_splitting) == (False, False, True)
    store = dist.new_group([0, 1]).get_group_store()
    store.set(f"from {rank}", str(rank))
    assert store.get(f"from {1 - rank}") == str(1 - rank).encode()
    called = group._get_sequence_number_for_group()
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
    assert group._get_sequence_number_for_group() == called + 1
