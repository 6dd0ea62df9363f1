"""How much memory a node needs for one training. Each engine runs alone, because memory that another one has freed is not given back."""

import os

import torch
import torch.distributed as dist

from benchmarks.contestants import parameter_bytes, trainer
from benchmarks.gauges import watched
from benchmarks.journal import Alone
from benchmarks.plan import Memory
from benchmarks.race import Contender, race
from benchmarks.targets import OURS
from shardnet import Backend


def measure(session: Memory, backend: Backend) -> Alone:
    """What one engine needs, as rank 0 sees it: memory of its ranks and, for shardnet, of the process that forked them. A collective."""
    pids = torch.zeros(backend.world_size, dtype=torch.int64)
    pids[backend.rank] = os.getpid()
    dist.all_reduce(pids)
    processes = [*pids.tolist(), *([os.getppid()] if session.engine == OURS else [])]
    with watched(lambda: processes if backend.rank == 0 else ()) as peak:
        training = trainer(session.engine, session, backend)
        (timing,) = race([Contender(session.engine, training.step)], session.steps)
    return Alone(timing, peak[0], parameter_bytes(session), training.losses[-1])
