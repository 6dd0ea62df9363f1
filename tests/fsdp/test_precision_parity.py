"""bfloat16 over float32 parameters: every strategy deviates from one process by no more than FSDP2 does.

[Note: tolerance] In bfloat16 the split of a batch over ranks and micro-batches changes how activations and gradients are
rounded, so a sharded training ends elsewhere than that of one process on the whole batch. How far FSDP2 ends from it is
measured here, over gloo in real processes, on 3 and 4 ranks with 1 and 3 micro-batches. For each optimizer ours may end up to
1.5 times as far away as the farthest of these: both are samples of the same noise.
"""

from contextlib import nullcontext
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from shardnet.zero import ZeroOptimizer
from tests.fsdp.cases import BFLOAT16, MICRO_BATCHES, OPTIMIZERS, Case, make_small, train_share
from tests.fsdp.conftest import START_S, fsdp2_runs
from tests.fsdp.mixed_training import POLICY, Cast, Deviation, deviation, largest, train_alone
from tests.fsdp.models import Block
from tests.fsdp.ranks import run_ranks
from tests.fsdp.training import Run
from tests.training.workers import Nursery
from tests.zero.training import OPTIMIZERS as CLASSES

FULL, GRAD, NONE, HYBRID = ShardingStrategy
PLACES = [*((strategy, world_size, None) for strategy in (FULL, GRAD, NONE) for world_size in (1, 2, 3, 4)), (HYBRID, 4, 2)]
alone = cache(train_alone)


@pytest.fixture(scope="module")
def fsdp2(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference runs in bfloat16."""
    return fsdp2_runs(nursery, tmp_path_factory, "bfloat16")


def train(case: Case, strategy: ShardingStrategy = FULL, node: int | None = None) -> Run:
    def work(backend: Backend) -> Run:
        model = FSDP(make_small(), backend, units=[Block], strategy=strategy, intra_node_size=node, mixed_precision=POLICY)
        losses = train_share(model, backend.rank, case, model.no_sync)
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        return Run(losses, model.full_state_dict())

    runs = run_ranks(case.world_size, work)
    for run in runs:
        assert identical(run, runs[0]), "two ranks differ"
    return Run([sum(losses) / len(losses) for losses in zip(*(run.losses for run in runs), strict=True)], runs[0].state)


def identical(left: Run, right: Run) -> bool:
    return all(torch.equal(value, right.state[name]) for name, value in left.state.items())


@cache
def theirs(folder: Path, case: Case) -> Run:
    with np.load(folder / f"{case}.npz") as arrays:
        state = {name: torch.from_numpy(arrays[name]) for name in arrays.files if name != "losses"}
        return Run(arrays["losses"].tolist(), state | {"head.weight": state["tokens.weight"]})


@cache
def tolerance(folder: Path, optimizer: str) -> Deviation:
    """See [Note: tolerance]."""
    shown = largest(deviation(theirs(folder, case), alone(optimizer)) for case in BFLOAT16 if case.optimizer == optimizer)
    return Deviation(*(1.5 * value for value in shown))


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("strategy", "world_size", "node"), PLACES)
def test_training_deviates_no_more_than_fsdp2(
    fsdp2: Path, strategy: ShardingStrategy, world_size: int, node: int | None, optimizer: str, micro_batches: int
) -> None:
    case = Case(world_size, optimizer, micro_batches, dtype="bfloat16")
    run, allowed = train(case, strategy, node), tolerance(fsdp2, optimizer)
    ours = deviation(run, alone(optimizer))
    assert ours.loss <= allowed.loss
    assert ours.parameters <= allowed.parameters


def train_whole(case: Case) -> Run:
    """Train with ZeRO-1: the module is whole on every rank, and casts its parameters itself."""

    def work(backend: Backend) -> Run:
        model = make_small()
        optimizer_class, options = CLASSES[case.optimizer]
        optimizer = ZeroOptimizer(model.parameters(), optimizer_class, backend, **options)
        losses = train_share(Cast(model), backend.rank, case, nullcontext, optimizer)
        return Run(losses, {name: value.clone() for name, value in model.state_dict().items()})

    runs = run_ranks(case.world_size, work)
    for run in runs:
        assert identical(run, runs[0]), "two ranks differ"
    return Run([sum(losses) / len(losses) for losses in zip(*(run.losses for run in runs), strict=True)], runs[0].state)


@pytest.mark.timeout(2 * START_S)
@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_sharded_optimizer_deviates_no_more_than_fsdp2(fsdp2: Path, world_size: int, optimizer: str, micro_batches: int) -> None:
    run, allowed = train_whole(Case(world_size, optimizer, micro_batches, dtype="bfloat16")), tolerance(fsdp2, optimizer)
    ours = deviation(run, alone(optimizer))
    assert ours.loss <= allowed.loss
    assert ours.parameters <= allowed.parameters


@pytest.mark.parametrize(("strategy", "node"), [(FULL, None), (GRAD, None), (NONE, None), (HYBRID, 2)])
def test_a_repeated_run_is_bit_identical(strategy: ShardingStrategy, node: int | None) -> None:
    case = Case(4, "adamw", 3)
    assert identical(train(case, strategy, node), train(case, strategy, node))
