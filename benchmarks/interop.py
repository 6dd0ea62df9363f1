"""torch's own collectives and trainings over a process group of shardnet's and over one of gloo's, in turn.

Trainings run a third time over a group that moves nothing, which shows how much of a step is left for moving data.
"""

import datetime
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - brings the backend "fake", which does nothing

from benchmarks.contestants import Trainer, fully_sharded, new_model, own_batch, parameter_bytes
from benchmarks.plan import Interop, Op, calls_of, default_repeats
from benchmarks.race import Contender, race
from benchmarks.row import Row, Timing
from benchmarks.targets import GLOO, OURS
from gpt import GPT

FREE = "free"
TIMEOUT = datetime.timedelta(seconds=120)
_MOVED = {"ddp_step": 2, "fsdp2_step": 3}  # how often a ring sends all parameters; DDP's reduction counts twice
Groups = dict[str, dist.ProcessGroup]


@contextmanager
def groups_of(store: Path, rank: int, ranks: int) -> Iterator[Groups]:
    """The three process groups, by name; shardnet's is torch's default group."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group("shardnet", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        groups = {OURS: dist.group.WORLD, GLOO: dist.new_group(backend="gloo", timeout=TIMEOUT), FREE: dist.new_group(backend="fake")}
        yield {name: group for name, group in groups.items() if isinstance(group, dist.ProcessGroup)}
    finally:
        dist.destroy_process_group()


def measure(session: Interop, groups: Groups, on_row: Callable[[], None]) -> Iterator[Row]:
    """A row for each collective and size, then one for each training; the same on all ranks. A collective."""
    for size in session.sizes:
        for op, calls in _collectives(size, groups).items():
            contenders = [Contender(name, call, calls=calls_of(size)) for name, call in calls.items()]
            ours, theirs = race(contenders, session.repeats or default_repeats(size))
            yield _row(session, str(op), size, (ours, theirs), op.moved_bytes(size, session.ranks))
            on_row()
    for name, make in (("ddp_step", _ddp), ("fsdp2_step", _fsdp2)):
        trainers = [Trainer(each, make(new_model(session), group), own_batch(session, dist.get_rank())) for each, group in groups.items()]
        ours, theirs, free = race([Contender(trainer.name, trainer.step) for trainer in trainers], session.steps)
        size = parameter_bytes(session)
        moved_bytes = _MOVED[name] * (session.ranks - 1) * size
        yield _row(session, name, size, (ours, theirs), moved_bytes, layers=session.layers, free_ms=free.quartiles_ms()[1])
        on_row()


def _collectives(size: int, groups: Groups) -> dict[Op, dict[str, Callable[[], object]]]:
    """Each collective over each group, on tensors that have `size` bytes on a rank while they are whole."""
    groups = {name: group for name, group in groups.items() if name != FREE}
    whole = torch.ones(size // 4)
    part = torch.ones(len(whole) // dist.get_world_size())
    return {
        Op.ALL_GATHER: {name: partial(dist.all_gather_into_tensor, whole, part, group=group) for name, group in groups.items()},
        Op.REDUCE_SCATTER: {name: partial(dist.reduce_scatter_tensor, part, whole, group=group) for name, group in groups.items()},
        Op.ALL_REDUCE: {
            name: partial(dist.all_reduce, torch.ones_like(whole), dist.ReduceOp.MAX, group=group) for name, group in groups.items()
        },
    }


def _ddp(model: GPT, group: dist.ProcessGroup) -> nn.Module:
    replica = nn.parallel.DistributedDataParallel(model, process_group=group)
    if dist.get_backend(group) == "fake":  # its handles lack the result that DDP looks for
        replica.register_comm_hook(None, _as_it_is)
    return replica


def _as_it_is(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _fsdp2(model: GPT, group: dist.ProcessGroup) -> nn.Module:
    return fully_sharded(model, DeviceMesh.from_group(group, "cpu"))


def _row(session: Interop, op: str, size: int, timings: tuple[Timing, Timing], moved_bytes: int, **facts: Any) -> Row:
    ours, theirs = timings
    return Row.compare(
        ours,
        theirs,
        kind=session.kind,
        op=op,
        topology=str(session.topology),
        transport=str(session.transport),
        ranks=session.ranks,
        bytes=size,
        peer=GLOO,
        moved_bytes=moved_bytes,
        chunk_bytes=session.chunk_bytes,
        **facts,
    )
