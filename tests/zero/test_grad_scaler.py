"""Gradient scaling over a sharded optimizer: all ranks skip a step or none does, and float16 trains as in one process."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.fsdp import GradScaler
from shardnet.zero import ZeroOptimizer
from tests.fsdp.cases import make_small
from tests.fsdp.mixed_training import deviation
from tests.fsdp.models import Block, loss_of, token_batches
from tests.fsdp.ranks import run_ranks
from tests.fsdp.training import SAMPLES, Run
from tests.zero.training import groups_of

Tensor = torch.Tensor
INPUT = torch.tensor([1.0, 2, 3, 4, 5])


class Scaled(nn.Module):
    """y = (w + v) . x: both gradients are x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(5))
        self.v = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.w + self.v) * x).sum()


def sharded(model: Scaled, backend: Backend, **choices: Any) -> ZeroOptimizer:
    """Two groups; the second one moves twice as far."""
    groups: list[dict[str, Any]] = [{"params": [model.w]}, {"params": [model.v], "lr": 2.0}]
    return ZeroOptimizer(groups, optim.SGD, backend, lr=1.0, **choices)


def around(optimizer: ZeroOptimizer, early: bool) -> AbstractContextManager[None]:
    return optimizer.last_backward() if early else nullcontext()


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


# --- the decision


@pytest.mark.parametrize("split", ["elements", "parameters"])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("planted", [math.inf, math.nan])
def test_an_overflow_on_one_rank_makes_every_rank_skip(planted: float, clips: bool, early: bool, split: str) -> None:
    """The overflow is in the last element, so only the rank that owns this element sees a mean that is not finite."""

    def work(backend: Backend) -> list[tuple[float, list[float], list[float]]]:
        model, scaler = Scaled(), GradScaler(backend, init_scale=1024.0)
        optimizer = sharded(model, backend, module=model, split=split)
        result = []
        for overflows in (True, False):
            x = INPUT.clone()
            if overflows and backend.rank == 1:
                x[-1] = planted
            with around(optimizer, early):
                backward(scaler.scale(model(x)))
            if clips:
                scaler.unscale_(optimizer)
                norm = optimizer.clip_grad_norm_(1.0)
                assert norm.isfinite() != overflows
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            optimizer.wait()
            result.append((scaler.get_scale(), model.w.tolist(), model.v.tolist()))
        return result

    factor = 1 / (INPUT.norm().item() * math.sqrt(2)) if clips else 1.0
    moved = [(1 - factor * INPUT).tolist(), (1 - 2 * factor * INPUT).tolist()]
    for skipped, taken in run_ranks(3, work):
        assert skipped == (512.0, [1.0] * 5, [1.0] * 5)
        assert taken[0] == 512.0
        assert [*taken[1], *taken[2]] == pytest.approx([*moved[0], *moved[1]], abs=1e-5)


def test_an_overflow_in_one_ranks_backward_makes_every_rank_skip() -> None:
    """In float16, in which 4 · 2¹⁵ overflows."""

    def work(backend: Backend) -> tuple[float, list[float]]:
        model, scaler = Scaled(), GradScaler(backend, init_scale=2.0**15)
        optimizer = sharded(model, backend)
        x = torch.tensor([1.0, 1, 1, 1, 4 if backend.rank == 1 else 1], dtype=torch.float16)
        halves = {name: parameter.half() for name, parameter in model.named_parameters()}
        backward(scaler.scale(torch.func.functional_call(model, halves, (x,)).float()))
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert model.w.grad is not None
        assert bool(model.w.grad.isfinite().all()) == (backend.rank != 1)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), model.w.tolist()

    assert run_ranks(3, work) == [(2.0**14, [1.0] * 5)] * 3


def test_a_mean_that_overflows_makes_every_rank_skip() -> None:
    def work(backend: Backend) -> tuple[float, list[float]]:
        model, scaler = Scaled(), GradScaler(backend, init_scale=2.0)
        optimizer = sharded(model, backend)
        backward(scaler.scale(model(torch.tensor([1.0, 1, 1, 1, 1.5e38]))))  # 3e38 on each rank; their sum, 6e38, overflows
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), model.w.tolist()

    assert run_ranks(2, work) == [(1.0, [1.0] * 5)] * 2


def test_a_skipped_step_leaves_nothing_behind_whoever_clears_the_gradients() -> None:
    def work(backend: Backend, early: bool) -> list[float]:
        model, scaler = Scaled(), GradScaler(backend, init_scale=4.0)
        optimizer = sharded(model, backend)
        for x in (INPUT * (math.inf if backend.rank == 1 else 1), INPUT):
            with around(optimizer, early):
                backward(scaler.scale(model(x)))
            scaler.step(optimizer)
            scaler.update()
            model.zero_grad()
        return model.w.tolist()

    for early in (False, True):
        assert run_ranks(2, lambda backend, early=early: work(backend, early)) == [(1 - INPUT).tolist()] * 2  # type: ignore[misc]


def test_a_rank_that_owns_nothing_decides_with_the_others() -> None:
    def work(backend: Backend) -> list[tuple[float, float]]:
        weight = nn.Parameter(torch.ones(1))
        optimizer, scaler = ZeroOptimizer([weight], optim.SGD, backend, lr=1.0), GradScaler(backend, init_scale=4.0)
        result = []
        for factor in (math.inf, 1.0):
            backward(scaler.scale((weight * (factor if backend.rank == 2 else 1.0)).sum()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            result.append((scaler.get_scale(), weight.item()))
        return result

    assert run_ranks(3, work) == [[(2.0, 1.0), (2.0, 0.0)]] * 3


def test_gradients_that_are_averaged_already_are_unscaled() -> None:
    def work(backend: Backend) -> list[float]:
        model, scaler = Scaled(), GradScaler(backend, init_scale=8.0)
        optimizer = sharded(model, backend, reduce_gradients=False)
        backward(scaler.scale(model(INPUT)))
        scaler.unscale_(optimizer)
        assert model.w.grad is not None
        assert model.w.grad.tolist() == (8 * INPUT).tolist()  # the user's own gradient is still scaled
        scaler.step(optimizer)
        scaler.update()
        return model.w.tolist()

    assert run_ranks(2, work) == [(1 - INPUT).tolist()] * 2


def test_switched_off_it_only_steps() -> None:
    def work(backend: Backend, make: Callable[[Backend], torch.amp.GradScaler]) -> list[float]:
        model, scaler = Scaled(), make(backend)
        optimizer = sharded(model, backend)
        backward(scaler.scale(model(INPUT)))
        scaler.step(optimizer)
        scaler.update()
        return model.w.tolist()

    for make in (lambda backend: GradScaler(backend, enabled=False), lambda _: torch.amp.GradScaler("cpu", enabled=False)):
        assert run_ranks(2, lambda backend, make=make: work(backend, make)) == [(1 - INPUT).tolist()] * 2  # type: ignore[misc]


# --- refusals


def test_torchs_own_is_refused_on_every_rank_before_it_decides() -> None:
    """It would step on all ranks except one, and these would average with what that rank sends one step later."""

    def work(backend: Backend) -> None:
        model, scaler = Scaled(), torch.amp.GradScaler("cpu")
        optimizer = sharded(model, backend)
        backward(scaler.scale(model(INPUT * (math.inf if backend.rank == 1 else 1))))
        with pytest.raises(UsageError, match=r"use shardnet\.fsdp\.GradScaler"):
            scaler.step(optimizer)

    run_ranks(2, work)


def test_a_backward_after_unscaling_is_not_lost_in_silence() -> None:
    def work(backend: Backend) -> None:
        model, scaler = Scaled(), GradScaler(backend, init_scale=4.0)
        optimizer = sharded(model, backend)
        backward(scaler.scale(model(INPUT)))
        scaler.unscale_(optimizer)
        backward(scaler.scale(model(INPUT)))
        with pytest.raises(StateError, match="gradients changed after clip_grad_norm_"):
            scaler.step(optimizer)

    run_ranks(2, work)


# --- training


def train(
    model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler, clips: bool, early: bool = False, rank: int = 0, world_size: int = 1
) -> tuple[list[float], list[float]]:
    """Train in steps of two micro-batches; return the losses of this rank's share, and the scale after each step."""
    losses, scales = [], []

    def loss_in_half(part: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(model, part) / 2

    for batch in token_batches(8, SAMPLES):
        first, last = batch.chunk(world_size)[rank].chunk(2)
        loss = loss_in_half(first)
        backward(scaler.scale(loss))
        with around(optimizer, early):
            second = loss_in_half(last)
            backward(scaler.scale(second))
        if clips:
            scaler.unscale_(optimizer)
            if isinstance(optimizer, ZeroOptimizer):
                optimizer.clip_grad_norm_(0.5)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item() + second.item())
        scales.append(scaler.get_scale())
    return losses, scales


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_float16_trains_as_in_one_process(world_size: int, clips: bool, early: bool) -> None:
    """Begin at a scale at which the first step overflows, with two groups; see tests/fsdp/test_grad_scaler.py for the tolerance.

    A single rank ends with the bits of plain torch, except if it clips: torch computes the norm with fewer digits.
    """
    settings: dict[str, Any] = {"init_scale": 2.0**33, "backoff_factor": 2.0**-20}
    whole = make_small()
    losses, scales = train(whole, optim.AdamW(groups_of(whole), lr=3e-3), torch.amp.GradScaler("cpu", **settings), clips)
    expected = Run(losses, whole.state_dict())

    def work(backend: Backend) -> tuple[Run, list[float]]:
        model = make_small()
        optimizer = ZeroOptimizer(groups_of(model), optim.AdamW, backend, lr=3e-3, module=model, units=[Block])
        losses, scales = train(model, optimizer, GradScaler(backend, **settings), clips, early, backend.rank, world_size)
        optimizer.wait()
        return Run(losses, {name: value.clone() for name, value in model.state_dict().items()}), scales

    runs = run_ranks(world_size, work)
    combined = [sum(values) / world_size for values in zip(*(run.losses for run, _ in runs), strict=True)]
    for run, ours in runs:
        assert ours == scales == [2.0**13] * 8
        assert max(deviation(Run(combined, run.state), expected)) <= (0.0 if world_size == 1 and not clips else 0.003)
        assert all(torch.equal(value, runs[0][0].state[name]) for name, value in run.state.items())
