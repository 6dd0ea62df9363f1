"""Programs that look at torch's handles of operations under way; run by forked ranks."""

# mypy: disable-error-code="attr-defined, no-untyped-call, arg-type, union-attr"

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.interop import programs

TIMEOUT = timedelta(seconds=25)


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on `world_size` ranks; return how many ranks failed."""
    return programs.launch(globals()[name], folder, int(world_size))


def polled(rank: int, world_size: int, _: Path) -> None:
    """A caller that polls until a work is completed has the result, without waiting."""
    ranks = range(world_size)
    mine, sums = torch.arange(float(world_size)) + rank, float(sum(ranks))

    def poll(work: dist.Work | None) -> None:
        assert work is not None
        while not work.is_completed():
            os.sched_yield()
        assert work.is_success()
        assert work.exception() is None

    rows = [torch.full((world_size,), -1.0) for _ in ranks]
    poll(dist.all_gather(rows, mine, async_op=True))
    assert all(torch.equal(row, torch.arange(float(world_size)) + each) for each, row in enumerate(rows))
    one = torch.full((1,), -1.0)
    poll(dist.reduce_scatter(one, list(mine.split(1)), async_op=True))
    assert one.item() == sums + rank * world_size
    out = torch.full((world_size,), -1.0)
    poll(dist.all_to_all_single(out, mine, async_op=True))
    assert out.tolist() == [each + rank for each in ranks]
    parts = list(torch.full((world_size, 1), -1.0).unbind())
    poll(dist.all_to_all(parts, list(mine.split(1)), async_op=True))
    assert [part.item() for part in parts] == out.tolist()
    gathered = [torch.full((world_size,), -1.0) for _ in ranks]
    poll(dist.gather(mine, gathered if rank == 0 else None, dst=0, async_op=True))
    assert rank or all(torch.equal(*pair) for pair in zip(gathered, rows, strict=True))
    poll(dist.scatter(one, [torch.full((1,), each + 7.0) for each in ranks] if rank == 0 else None, src=0, async_op=True))
    assert one.item() == rank + 7.0
    poll(dist.reduce(mine, dst=0, async_op=True))
    assert rank or mine.tolist() == [sums + each * world_size for each in ranks]
    strided = torch.full((3, 2), float(rank)).t()
    poll(dist.all_reduce(strided, async_op=True))
    assert strided.tolist() == [[sums] * 3] * 2


def in_flight(rank: int, world_size: int, _: Path) -> None:
    """A collective that is under way may be given to a graph, which waits for its tensor."""
    import torch.distributed._functional_collectives as functional

    tensor = torch.full((4,), float(rank))
    with functional.allow_inflight_collective_as_graph_input_ctx():
        dist.all_reduce(tensor, async_op=True)
        torch.ops._c10d_functional.wait_tensor(tensor)
    assert tensor.tolist() == [sum(range(world_size))] * 4


def facts(rank: int, world_size: int, _: Path) -> None:
    """What works report about themselves."""
    group = dist.new_group([1, 0], timeout=TIMEOUT)
    first, second = (dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(2))
    assert second._get_sequence_number() == first._get_sequence_number() + 1
    assert first.timeout == TIMEOUT
    assert dist.all_reduce(torch.ones(1), async_op=True).timeout == programs.TIMEOUT
    with pytest.raises(RuntimeError, match="recv"):
        first.source_rank()
    other = 1 - rank
    for source in (other, None):
        incoming = dist.irecv(torch.empty(1), source)
        dist.send(torch.ones(1), other)
        assert incoming.source_rank() == incoming._source_rank() == other
    late = dist.irecv(torch.empty(1), other, tag=1)
    with pytest.raises(TimeoutError, match=r"recv was not done within 0\.02 s; the operation goes on"):
        late.wait(timedelta(milliseconds=20))
    dist.barrier()  # both have waited in vain
    dist.send(torch.ones(1), other, tag=1)
    late.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        tensors = [torch.ones(1) for _ in range(2)]
        for tensor in tensors:
            dist.all_reduce(tensor)
    joined = manager.works[0]
    joined.synchronize()
    joined.block_current_stream()
    assert [tensor.item() for tensor in tensors] == [world_size] * 2
