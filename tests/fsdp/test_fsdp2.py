"""The same training as PyTorch's own FSDP2 over gloo: losses and parameters after every one of them."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fsdp.fsdp2_worker import WORLD_SIZES
from tests.fsdp.training import train_sharded

START_S = 100  # a process imports torch and its compiler; most of this is for a busy machine


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what fully_shard's ranks, real processes, have written."""
    folder = tmp_path_factory.mktemp("fsdp2")
    command = [sys.executable, "-m", "tests.fsdp.fsdp2_worker", str(folder)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_twenty_steps_equal_fully_shard(reference: Path, world_size: int) -> None:
    with np.load(reference / f"{world_size}.npz") as theirs:
        ours = train_sharded(world_size)[0]
        assert ours.losses == pytest.approx(theirs["losses"].tolist(), rel=0, abs=1e-5)
        names = [name for name in theirs.files if name != "losses"]
        assert set(names) | {"head.weight"} == set(ours.state)  # tied to tokens.weight
        for name in names:
            torch.testing.assert_close(ours.state[name], torch.from_numpy(theirs[name]), rtol=0, atol=1e-5, msg=name)
