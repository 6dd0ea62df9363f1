"""Training on several ranks is training in one process on the combined batch."""

from dataclasses import dataclass

import pytest
import torch

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
STEPS = 20
SAMPLES = 12  # divisible by every world size below, so that the mean over ranks is the mean over samples


@dataclass
class Run:
    losses: list[float]  # of the combined batch
    state: dict[str, Tensor]


def optimizer_for(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3)  # type: ignore[arg-type]


def train_alone() -> Run:
    model = make_gpt()
    optimizer = optimizer_for(model.parameters())
    losses = []
    for batch in token_batches(STEPS, SAMPLES):
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Run(losses, model.state_dict())


def train_sharded(world_size: int, *, prefetch: int = 1, explicit: bool = False, optimizer_first: bool = False) -> list[Run]:
    def work(backend: Backend) -> Run:
        inner = make_gpt(seed=backend.rank)  # only rank 0's counts
        before = optimizer_for(inner.parameters()) if optimizer_first else None
        model = FSDP(inner, backend, units=[Block], prefetch=prefetch)
        optimizer = before or optimizer_for(model.parameters())
        share = SAMPLES // world_size
        losses = []
        for batch in token_batches(STEPS, SAMPLES):
            loss = loss_of(model, batch[backend.rank * share :][:share])
            loss.backward()  # type: ignore[no-untyped-call]
            if explicit:
                model.prefetch_forward_params()  # and then a step: it must not be lost
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return Run(losses, model.full_state_dict())

    runs = run_ranks(world_size, work)
    combined = [sum(losses) / world_size for losses in zip(*(run.losses for run in runs), strict=True)]
    return [Run(combined, run.state) for run in runs]


def check_equal(left: Run, right: Run, *, tolerance: float) -> None:
    assert list(left.state) == list(right.state)
    for name, value in left.state.items():
        torch.testing.assert_close(value, right.state[name], rtol=0, atol=tolerance, msg=name)
    assert left.losses == pytest.approx(right.losses, rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def alone() -> Run:
    return train_alone()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_twenty_steps_equal_one_process(alone: Run, world_size: int) -> None:
    runs = train_sharded(world_size)
    assert alone.losses[-1] < alone.losses[0] - 0.01  # something was learnt
    for run in runs:
        check_equal(run, alone, tolerance=1e-5)
        check_equal(run, runs[0], tolerance=0)


def test_a_world_of_one_is_the_unsharded_model_bit_for_bit(alone: Run) -> None:
    check_equal(train_sharded(1)[0], alone, tolerance=0)


def test_a_repeated_run_is_bit_identical() -> None:
    check_equal(train_sharded(3)[0], train_sharded(3)[0], tolerance=0)


def test_prefetch_and_the_moment_of_making_the_optimizer_change_no_bit() -> None:
    plain = train_sharded(2, prefetch=0)[0]
    check_equal(train_sharded(2, prefetch=3)[0], plain, tolerance=0)
    check_equal(train_sharded(2, explicit=True)[0], plain, tolerance=0)
    check_equal(train_sharded(2, optimizer_first=True)[0], plain, tolerance=0)
