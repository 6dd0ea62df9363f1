"""Clipping by the norm of the averaged gradients: equal to one process, and equal on all ranks."""

import math
from typing import Any

import pytest
import torch
from torch import nn, optim

from shardnet.backend import Backend
from shardnet.errors import StateError, UsageError
from shardnet.zero import ZeroOptimizer
from tests.fsdp.ranks import run_ranks
from tests.zero.alike import Place, check_alike, make_model


def clip(model: nn.Module, optimizer: Any, max_norm: float, norm_type: float = 2.0) -> float:
    if isinstance(optimizer, ZeroOptimizer):
        return optimizer.clip_grad_norm_(max_norm, norm_type).item()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type).item()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.05, 1e6])
@pytest.mark.parametrize("split", ["elements", "parameters"])
def test_clipped_training_equals_one_process(norm_type: float, max_norm: float, split: str) -> None:
    def program(model: nn.Sequential, place: Place) -> list[float]:
        optimizer = place.optimizer(model, model.parameters(), optim.SGD, lr=0.05, momentum=0.9)
        norms = []
        for step in range(4):
            optimizer.zero_grad()
            place.loss(model, step).backward()  # type: ignore[no-untyped-call]
            norms.append(clip(model, optimizer, max_norm, norm_type))
            optimizer.step()
        return norms

    check_alike(program, 3, split=split)


def test_clipping_twice_and_with_a_new_scheduler_step_between() -> None:
    def program(model: nn.Sequential, place: Place) -> list[float]:
        optimizer = place.optimizer(model, model.parameters(), optim.SGD, lr=0.05)
        place.loss(model, 0).backward()  # type: ignore[no-untyped-call]
        norms = [clip(model, optimizer, 0.5)]
        optimizer.param_groups[0]["lr"] = 0.1
        norms.append(clip(model, optimizer, 0.1))
        optimizer.step()
        return norms

    check_alike(program)


def test_gradients_that_change_after_clipping_are_not_lost_in_silence() -> None:
    def work(backend: Backend) -> None:
        model = make_model()
        optimizer = ZeroOptimizer(model.parameters(), optim.SGD, backend, lr=0.1)
        place = Place(backend)
        place.loss(model, 0).backward()  # type: ignore[no-untyped-call]
        optimizer.clip_grad_norm_(1.0)
        place.loss(model, 1).backward()  # type: ignore[no-untyped-call]
        for refused in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0)):
            with pytest.raises(StateError, match="gradients changed after clip_grad_norm_"):
                refused()
        optimizer.zero_grad()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer.step()  # there are no gradients, so it changes nothing
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    run_ranks(2, work)


def test_groups_cannot_be_added_between_clipping_and_step() -> None:
    def work(backend: Backend) -> None:
        optimizer = ZeroOptimizer([nn.Parameter(torch.ones(3))], optim.SGD, backend)
        optimizer.clip_grad_norm_(1.0)
        with pytest.raises(StateError, match="between clip_grad_norm_"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        optimizer.step()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    run_ranks(2, work)


def test_a_norm_type_that_is_none_is_refused() -> None:
    def work(backend: Backend) -> None:
        with pytest.raises(UsageError, match="norm_type"):
            ZeroOptimizer([nn.Parameter(torch.ones(3))], optim.SGD, backend).clip_grad_norm_(1.0, 0.0)

    run_ranks(1, work)
