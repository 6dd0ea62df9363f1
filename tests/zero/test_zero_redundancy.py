"""The same training as PyTorch's own ZeroRedundancyOptimizer over gloo: the loss of every step, and the parameters after the last."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.training.workers import Nursery
from tests.zero.redundancy_worker import DTYPES, MICRO_BATCHES, WORLD_SIZES
from tests.zero.training import OPTIMIZERS, train_sharded

# In bfloat16 most runs are as close as in float32; but the last bit of a sum may round a weight to its neighbour.
TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1e-3)}  # of losses and of parameters
START_S = 100  # a process imports torch and its compiler; most of this is for a busy machine


@pytest.fixture(scope="module")
def reference(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which torch's ranks, which are real processes, have written their results."""
    return nursery.reference("tests.zero.redundancy_worker:main", partial(tmp_path_factory.mktemp, "redundancy"), within_s=START_S)


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_steps_equal_zero_redundancy_optimizer(reference: Path, world_size: int, kind: str, micro_batches: int, dtype: torch.dtype) -> None:
    of_losses, of_parameters = TOLERANCES[dtype]
    with np.load(reference / f"{world_size}-{kind}-{micro_batches}-{dtype}.npz") as theirs:
        ours = train_sharded(world_size, kind, micro_batches=micro_batches, dtype=dtype)[0]
        assert ours.losses == pytest.approx(theirs["losses"].tolist(), rel=0, abs=of_losses)
        assert sorted(ours.parameters) == sorted(name for name in theirs.files if name != "losses")
        for name, value in ours.parameters.items():
            torch.testing.assert_close(value, torch.from_numpy(theirs[name]), rtol=0, atol=of_parameters, msg=name)
