"""Programs with groups in which shardnet carries tensors of some devices and gloo those of others; run by forked ranks. The expected
results are those of gloo alone."""

# torch's types do not know all that torch documents:
# mypy: disable-error-code="attr-defined, call-overload, no-untyped-call, arg-type, union-attr, assignment, call-arg"

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardnet.errors import ClosedError, CollectiveError
from shardnet.interop import process_group
from shardnet.interop.mixed import MixedProcessGroup
from shardnet.interop.process_group import ShardnetProcessGroup
from tests.interop import orders, programs

MIXED = ("cpu:shardnet,cuda:gloo", "cuda:gloo,cpu:shardnet", "cpu:gloo,cuda:shardnet")  # with the last one gloo carries the CPU tensors


def main(folder: str, world_size: str, name: str, *environment: str) -> int:
    """Run one of the programs below on so many ranks, in an environment with NAME=VALUE; returns how many failed."""
    os.environ |= dict(each.split("=", 1) for each in environment)
    return programs.launch(globals()[name], folder, int(world_size))


def as_with_gloo(rank: int, world_size: int, _: Path) -> None:
    """Groups of every kind side by side, in a world of shardnet's."""
    for order in [list(range(world_size)), *orders.ORDERS[world_size]]:
        groups = [dist.new_group(order, backend=backend, sort_ranks=False) for backend in ("gloo", *MIXED)]
        if rank in order:
            assert [isinstance(group, MixedProcessGroup) for group in groups] == [False, True, True, True]
            for call in orders.CALLS:
                wanted, *found = (call(group, order) for group in groups)
                assert found == [wanted] * 3, (order, call.__name__, wanted, found)
    dist.barrier()


def groups_of_it(rank: int, world_size: int, _: Path) -> None:
    """They have all of its backends, and groups that are split from it may have only one."""
    order = orders.ORDERS[world_size][0]
    by_gloo = dist.new_group(order, backend="gloo", sort_ranks=False)
    for group in (dist.new_group(order, sort_ranks=False), dist.split_group(split_ranks=[order])):
        assert isinstance(group, MixedProcessGroup)
        assert group._get_backend(torch.device("cuda")).name() == "gloo"
        for call in orders.CALLS:
            assert call(group, order) == call(by_gloo, order), call.__name__
    ours = dist.split_group(split_ranks=[[0, 1]], backend="cpu:shardnet")
    theirs = dist.split_group(split_ranks=[[1, 0]], backend="cuda:gloo")
    if rank < 2:
        assert isinstance(ours, ShardnetProcessGroup)
        assert not isinstance(theirs, ShardnetProcessGroup | MixedProcessGroup)
        assert ([str(each) for each in theirs._device_types], theirs.rank()) == (["cuda"], 1 - rank)
        mine = torch.ones(2)
        dist.all_reduce(mine, group=ours)
        assert mine.tolist() == [2.0] * 2
    else:
        assert ours is theirs is dist.GroupMember.NON_GROUP_MEMBER
    dist.barrier()


def ended(rank: int, world_size: int, folder: Path) -> None:
    """One group is destroyed and made again, another one is aborted, and finally the whole world is, too."""
    for number in range(2):
        pair = dist.new_group([0, 1])
        if rank < 2:
            mine = torch.ones(2)
            dist.all_reduce(mine, group=pair)
            assert mine.tolist() == [2.0] * 2, number
            dist.destroy_process_group(pair)
    pair = dist.new_group([0, 1])
    if rank == 0:
        pair.abort()
        with pytest.raises(ClosedError, match="was aborted"):
            dist.all_reduce(torch.ones(2), group=pair)
    elif rank == 1:
        with pytest.raises(CollectiveError, match="was aborted by rank 0"):
            dist.all_reduce(torch.ones(2), group=pair)
    dist.barrier()
    dist.destroy_process_group()
    programs.begin(rank, world_size, folder, "another store")
    mine = torch.ones(2)
    dist.all_reduce(mine)
    assert mine.tolist() == [world_size] * 2


def one_cannot(rank: int, world_size: int, folder: Path) -> None:
    """A rank has no GPU for NCCL: it says so, and can start again. The others wait for it in torch's code, as long as they allow."""
    dist.destroy_process_group()
    backend = "cpu:shardnet,cuda:nccl" if rank == 0 else "cpu:shardnet,cuda:gloo"
    store, soon = f"file://{folder}/failing", timedelta(seconds=3)
    with pytest.raises(RuntimeError, match="CUDA device|no GPUs" if rank == 0 else "timeout") as failed:
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=world_size, timeout=soon)
    assert f"the other backends in {backend}" in failed.value.__notes__[0]
    assert not dist.is_initialized()
    assert not process_group._worlds, "its port and its connections are closed"
    programs.begin(rank, world_size, folder, "another store")
    mine = torch.ones(2)
    dist.all_reduce(mine)
    assert mine.tolist() == [world_size] * 2
