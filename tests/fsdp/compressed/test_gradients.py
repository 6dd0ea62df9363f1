"""Compressed gradients: what arrives, what is kept for the next step, and how much memory that takes."""

import math

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP, Compression, memory_report
from tests.fsdp.models import Block, Weighted, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.fsdp.scaled import Scaled, counted, gradient, scaled_steps

Tensor = torch.Tensor
HALF, FLOAT = torch.bfloat16, torch.float32
GRADIENTS = Compression(gradients="int8")
INT8 = Compression(weights="int8", gradients="int8")


@pytest.mark.parametrize("residual", [HALF, FLOAT, None])
def test_the_sum_of_many_gradients_is_right_with_error_feedback_only(residual: torch.dtype | None) -> None:
    """A gradient of 1 beside one of 1000 that cancels over ranks: in each step alone the 1 rounds to 0."""
    steps = 40

    def work(backend: Backend) -> float:
        model = FSDP(Scaled(4), backend, compression=Compression(gradients="int8", residual=residual))
        x = torch.tensor([1000.0 * (-1) ** backend.rank, 1.0, 0.0, 0.0])
        total = torch.stack([gradient(model, x) for _ in range(steps)]).sum(0)
        return total[1].item() if backend.rank == 0 else 0.0

    total = run_ranks(2, work)[0]
    if residual is None:
        assert total == 0
    else:
        assert total == pytest.approx(steps, abs=1000 / 127)


@pytest.mark.parametrize("planted", [math.inf, -math.inf, math.nan])
def test_a_gradient_that_is_not_finite_arrives_so_and_is_forgotten(planted: float) -> None:
    def work(backend: Backend) -> list[Tensor]:
        model = FSDP(Scaled(40), backend, compression=Compression(gradients="int8", block=16))
        results = []
        for broken in (False, True, False, False):
            x = torch.arange(1.0, 41.0)
            if broken and backend.rank == 1:
                x[2] = planted
            results.append(gradient(model, x))
        return results

    first, second = run_ranks(2, work)  # of 40 elements rank 0 has a block of 16 and one of 4
    assert first[1][:16].isnan().all()
    assert first[1][16:].isfinite().all()
    for step in (0, 2, 3):
        torch.testing.assert_close(first[step], torch.arange(1.0, 21.0), rtol=0, atol=20 / 127)
    for result in second:
        torch.testing.assert_close(result, torch.arange(21.0, 41.0), rtol=0, atol=40 / 127)


def test_an_overflow_makes_every_rank_skip_one_step() -> None:
    for skipped, taken in run_ranks(3, lambda backend: scaled_steps(backend, INT8, 6, 1, math.inf)):
        assert skipped == (512.0, 1.0)
        assert taken[0] == 512.0
        assert taken[1] == pytest.approx(0.0, abs=1e-5)


def test_weights_that_are_not_finite_are_not_hidden() -> None:
    def work(backend: Backend) -> tuple[float, list[float]]:
        model = FSDP(Weighted(1.0, 2.0, 3.0, 4.0), backend, compression=INT8)
        (weight,) = model.parameters()
        if backend.rank == 1:
            with torch.no_grad():
                weight[0] = math.inf
        return model(torch.tensor(1.0)).item(), model.full_state_dict()["weight"].tolist()

    for result, masters in run_ranks(2, work):
        assert math.isnan(result)
        assert masters == [1.0, 2.0, math.inf, 4.0]


def test_no_sync_quantizes_the_sum_once() -> None:
    def work(backend: Backend) -> tuple[list[float], int]:
        model = FSDP(Scaled(2), backend, compression=GRADIENTS)
        with model.no_sync():
            model(torch.tensor([100.0, 0.3])).backward()
            model(torch.tensor([-99.0, 0.3])).backward()
        before = counted(backend, "all_to_all").count
        model(torch.tensor([0.0, 0.4])).backward()
        (weight,) = model.parameters()
        assert weight.grad is not None
        return weight.grad.tolist(), counted(backend, "all_to_all").count - before

    for gradients, reductions in run_ranks(2, work):
        assert gradients == pytest.approx([1.0])
        assert reductions == 1


def test_unused_and_frozen_parameters() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Parameter(torch.ones(2)) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.used + self.frozen) * x).sum()

    def work(backend: Backend) -> None:
        model = FSDP(Branches(), backend, compression=INT8)
        parameters = dict(model.named_parameters())
        parameters["frozen"].requires_grad_(False)
        for _ in range(2):
            model(torch.ones(2)).backward()
        model.clip_grad_norm_(1.0)
        assert parameters["frozen"].grad is None
        for name, expected in (("used", 2**-0.5), ("unused", 0.0)):
            grad = parameters[name].grad
            assert grad is not None
            torch.testing.assert_close(grad, torch.full_like(grad, expected), rtol=1e-4, atol=1e-6)

    run_ranks(2, work)


# --- memory


@pytest.mark.parametrize(("residual", "itemsize"), [(None, 0), (HALF, 2), (FLOAT, 4)])
def test_residuals_are_counted_for_what_they_are(residual: torch.dtype | None, itemsize: int) -> None:
    parameters = sum(parameter.numel() for parameter in make_gpt().parameters())

    def work(backend: Backend) -> None:
        model = FSDP(make_gpt(), backend, units=[Block], compression=Compression("int8", "int8", residual=residual))
        assert memory_report(model).gradient_residuals == 0
        for batch in token_batches(2, 1):
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        held = memory_report(model)
        assert held.gradient_residuals == itemsize * parameters
        assert held.persistent == held.parameter_shards + held.gradient_shards + held.gradient_residuals
        assert held.packed == held.full_gradients == held.full_parameters == 0
        assert 0 < held.peak_packed < 2 * parameters
        assert held.pooled <= held.peak_full_parameters + held.peak_full_gradients + held.peak_packed
        model.unwrap()
        assert memory_report(model).gradient_residuals == 0

    run_ranks(3, work)


def test_packed_gradients_are_no_full_ones() -> None:
    """Gradients that wait for the network are packed: only the unit in backward and the root have full-size ones."""

    def work(backend: Backend, compression: Compression) -> int:
        model = FSDP(make_gpt(layers=5), backend, units=[Block], compression=compression)
        loss_of(model, token_batches(1, 1)[0]).backward()  # type: ignore[no-untyped-call]
        return memory_report(model).peak_full_gradients

    whole, block = (sum(parameter.nbytes for parameter in module.parameters()) for module in (make_gpt(layers=5), Block(18, 3)))
    assert run_ranks(2, lambda backend: work(backend, GRADIENTS)) == [whole - 5 * block + block] * 2
    assert run_ranks(2, lambda backend: work(backend, Compression())) > [whole - 5 * block + block] * 2
