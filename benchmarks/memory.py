"""How much memory a node needs for one training: each engine alone, for what another one has freed is not given back."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.contestants import parameter_bytes, trainer
from benchmarks.journal import Alone
from benchmarks.plan import Memory
from benchmarks.race import Contender, race
from shardnet import Backend

INTERVAL_S = 0.05


def measure(session: Memory, backend: Backend) -> Alone:
    """What one engine needs, as rank 0 sees it. A collective."""
    pids = torch.zeros(backend.world_size, dtype=torch.int64)
    pids[backend.rank] = os.getpid()
    dist.all_reduce(pids)
    with _watched(pids.tolist() if backend.rank == 0 else ()) as peak:
        training = trainer(session.engine, session, backend)
        (timing,) = race([Contender(session.engine, training.step)], session.steps)
    return Alone(timing, peak[0], parameter_bytes(session), training.losses[-1])


@contextmanager
def _watched(pids: Sequence[int]) -> Iterator[list[int]]:
    """The most bytes that these processes had together, up to now: what several have in common counts once."""
    peak, over = [0], threading.Event()

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], sum(map(_proportional_bytes, pids)))
            if over.wait(INTERVAL_S):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def _proportional_bytes(pid: int) -> int:
    """Resident memory of a process, of shared pages its share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/smaps_rollup has no line for Pss")
