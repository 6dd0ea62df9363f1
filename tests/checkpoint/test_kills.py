"""kill -9 at any moment of a save: afterwards the last checkpoint is found, or the one that was being saved."""

import asyncio
import os
import random
import select
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoint.saver import at_work
from tests.training.workers import PATIENCE_S, Nursery

SEED = 20_261_123


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.faults)])
def test_kill_9_while_checkpoints_are_saved(kills: int, nursery: Nursery, tmp_path: Path) -> None:
    """Each training goes on where the one before was killed."""
    rng = random.Random(SEED)
    known = 0
    for _ in range(kills):
        read, write = os.pipe()
        with Path(os.devnull).open() as nothing, (tmp_path / "errors").open("w") as errors:
            pid = nursery.fork(
                "tests.checkpoint.saver:begin", str(tmp_path / "run"), descriptors=(nothing.fileno(), write, errors.fileno())
            )
        os.close(write)
        assert select.select([read], [], [], PATIENCE_S)[0], (tmp_path / "errors").read_text()  # it has saved one, and saves the next
        time.sleep(rng.uniform(0.0, 0.1))  # no synchronisation: any moment will do
        os.kill(pid, signal.SIGKILL)
        assert nursery.wait(pid) == -signal.SIGKILL
        with os.fdopen(read) as said:
            last = int(said.read().split()[-1])
        assert last > known
        known = asyncio.run(at_work(tmp_path / "run", save=False))
        assert last <= known <= last + 1
        assert len([path for path in (tmp_path / "run").iterdir() if path.name.startswith("step-")]) <= 3
