"""The same trainings as PyTorch's own sharding over gloo: losses of every step, and parameters after the last."""

from pathlib import Path

import numpy as np
import pytest
import torch

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from tests.fsdp.cases import FLOAT32, Case, make_small, train_share
from tests.fsdp.conftest import START_S, fsdp2_runs
from tests.fsdp.fsdp2_worker import WORLD_SIZES
from tests.fsdp.models import Block
from tests.fsdp.ranks import run_ranks
from tests.fsdp.training import Run, train_sharded
from tests.training.workers import Nursery

pytestmark = pytest.mark.timeout(2 * START_S)


@pytest.fixture(scope="module")
def fsdp2(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference runs in float32."""
    return fsdp2_runs(nursery, tmp_path_factory, "float32")


def check_equal(ours: Run, path: Path) -> None:
    with np.load(path) as theirs:
        assert ours.losses == pytest.approx(theirs["losses"].tolist(), rel=0, abs=1e-5)
        names = [name for name in theirs.files if name != "losses"]
        assert set(names) | {"head.weight"} == set(ours.state)  # tied to tokens.weight
        for name in names:
            torch.testing.assert_close(ours.state[name], torch.from_numpy(theirs[name]), rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_steps_equal_fully_shard(fsdp2: Path, world_size: int) -> None:
    check_equal(train_sharded(world_size)[0], fsdp2 / f"{world_size}.npz")


@pytest.mark.parametrize("case", FLOAT32, ids=str)
def test_every_strategy_equals_torchs_own(fsdp2: Path, case: Case) -> None:
    def work(backend: Backend) -> Run:
        model = FSDP(make_small(), backend, units=[Block], strategy=case.strategy, intra_node_size=case.node)
        return Run(train_share(model, backend.rank, case, model.no_sync), model.full_state_dict())

    runs = run_ranks(case.world_size, work)
    losses = [sum(values) / len(values) for values in zip(*(run.losses for run in runs), strict=True)]
    check_equal(Run(losses, runs[0].state), fsdp2 / f"{case}.npz")
