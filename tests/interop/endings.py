"""Programs that end a group while something is under way in it; run by forked ranks."""

# torch's types do not know all that torch documents:
# mypy: disable-error-code="attr-defined, arg-type, union-attr"

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardnet.errors import ClosedError, CollectiveError, PeerLost
from tests.interop import programs

SOON_S = programs.TIMEOUT.total_seconds() / 3


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on `world_size` ranks; return how many ranks failed."""
    return programs.launch(globals()[name], folder, int(world_size))


def unmatched(rank: int, world_size: int, _: Path) -> None:
    """Receives to which nobody sends do not hold up a rank that leaves."""
    group = dist.new_group([0, 1])
    works = [
        dist.irecv(torch.zeros(2), 1 - rank, tag=9),
        dist.irecv(torch.zeros(2), tag=8),
        dist.irecv(torch.zeros(2), 1 - rank, group=group),
    ]
    dist.barrier()
    start = time.monotonic()
    dist.destroy_process_group()
    assert time.monotonic() - start < SOON_S
    for work in works:
        with pytest.raises((ClosedError, PeerLost)):  # the other rank's goodbye may have come first
            work.wait()


def sent_before(rank: int, world_size: int, _: Path) -> None:
    """What a rank has sent before it leaves is received by one that asks for it later."""
    if rank == 0:
        dist.isend(torch.full((100_000,), 7.0), 1)
        dist.isend(torch.full((2,), 8.0), 1, tag=5)
        dist.barrier()
        dist.destroy_process_group()
        return
    dist.barrier()
    for size, value, options in ((2, 8.0, {"tag": 5}), (100_000, 7.0, {"src": 0})):
        got = torch.zeros(size)
        assert dist.recv(got, **options) == 0
        assert torch.equal(got, torch.full((size,), value))


def one_is_aborted(rank: int, world_size: int, _: Path) -> None:
    """The first rank aborts a group in which all wait for one another; the others hear of it, and all other groups go on."""
    groups = [dist.new_group(list(range(world_size))), dist.new_group(list(range(world_size))[::-1], sort_ranks=False)]
    other = dist.new_group(list(range(world_size)))
    for group in groups:
        for each in (None, group, other):
            dist.all_reduce(torch.ones(3), group=each)
        after = (rank + 1) % world_size
        works = [
            dist.irecv(torch.zeros(2), after, group=group, tag=1),
            dist.irecv(torch.zeros(2), group=group, tag=2),
            dist.isend(torch.zeros(2), after, group=group, tag=3),
        ]
        if rank:
            works += [dist.all_reduce(torch.ones(size), group=group, async_op=True) for size in (3, 100_000)]
        dist.barrier(other)
        start = time.monotonic()
        if rank == 0:
            group.abort()
            group.abort()
            assert _errors(works) == {ClosedError}
            calls: list[Callable[[], object]] = [
                partial(dist.all_reduce, torch.ones(3), group=group),
                partial(dist.all_reduce, torch.ones(100_000), group=group),
                partial(dist.send, torch.ones(3), 1, group=group, tag=4),
                partial(dist.recv, torch.ones(3), group=group, tag=2),
                partial(dist.recv, torch.ones(3), group=group, tag=5),
            ]
            for call in calls:
                with pytest.raises(ClosedError, match=f"group '{group.group_name}' was aborted"):
                    call()
        else:
            for call in (
                partial(dist.recv, torch.ones(3), 0, group=group, tag=6),
                partial(dist.send, torch.ones(3), 0, group=group, tag=7),
                partial(dist.recv, torch.ones(3), group=group, tag=8),
            ):
                with pytest.raises(CollectiveError, match=rf"was aborted by rank 0: .* group '{group.group_name}' was aborted"):
                    call()
            with pytest.raises(CollectiveError, match=rf"all_reduce #1 was aborted by rank 0: .* group '{group.group_name}' was aborted"):
                works[3].wait()
            with pytest.raises(CollectiveError, match=rf"was aborted by rank 0: .* group '{group.group_name}' was aborted"):
                dist.all_reduce(torch.ones(3), group=group)
            group.abort()
            assert _errors(works) <= {ClosedError, CollectiveError}
        assert time.monotonic() - start < SOON_S
        for each in (None, other):
            mine = torch.ones(3)
            dist.all_reduce(mine, group=each)
            assert mine.tolist() == [float(world_size)] * 3
        dist.destroy_process_group(group)
    again = dist.new_group(list(range(world_size)))
    dist.all_reduce(torch.ones(3), group=again)
    dist.distributed_c10d._abort_process_group(again)
    dist.barrier()


def _errors(works: list[dist.Work]) -> set[type[BaseException]]:
    found = set[type[BaseException]]()
    for work in works:
        with pytest.raises(RuntimeError) as caught:  # as with torch's own backends
            work.wait()
        found.add(type(caught.value))
    return found
