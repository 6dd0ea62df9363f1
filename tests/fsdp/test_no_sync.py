"""Gradients that accumulate without synchronisation equal those of one process, and cost no traffic."""

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.errors import StateError
from shardnet.fsdp import FSDP
from shardnet.sharding import ShardingStrategy
from tests.fsdp.parity import check_against_one_process
from tests.fsdp.ranks import run_ranks
from tests.fsdp.stacks import Layer, Stack, seeded, square_loss

Tensor = torch.Tensor
FULL, GRAD, NONE, HYBRID = ShardingStrategy


@pytest.mark.parametrize("explicit", [False, True])
def test_gradients_accumulate_without_communication(explicit: bool) -> None:
    def three(model: nn.Module, rank: int) -> Tensor:
        return square_loss(model, rank) + square_loss(model, rank + 10) + square_loss(model, rank + 20)

    def train(model: FSDP, rank: int) -> None:
        with model.no_sync():
            square_loss(model, rank).backward()  # type: ignore[no-untyped-call]
            square_loss(model, rank + 10).backward()  # type: ignore[no-untyped-call]
            assert all(parameter.grad is None for parameter in model.parameters())
            with pytest.raises(StateError, match="sync_gradients"):
                model.clip_grad_norm_(1.0)
            if explicit:
                square_loss(model, rank + 20).backward()  # type: ignore[no-untyped-call]
        if explicit:
            model.sync_gradients()
        else:
            square_loss(model, rank + 20).backward()  # type: ignore[no-untyped-call]

    check_against_one_process(2, seeded(Stack), three, units=[Layer], train=train)


@pytest.mark.parametrize(("strategy", "node"), [(FULL, None), (GRAD, None), (NONE, None), (HYBRID, 2)])
def test_no_sync_reduces_nothing(strategy: ShardingStrategy, node: int | None) -> None:
    def work(backend: Backend) -> None:
        def reductions() -> int:
            return sum(counter.count for op, counter in backend.telemetry.ops.items() if op in ("reduce_scatter", "all_reduce"))

        model = FSDP(Stack(), backend, units=[Layer], strategy=strategy, intra_node_size=node)
        square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        before = reductions()
        assert before > 0
        with model.no_sync():
            square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        assert reductions() == before

    run_ranks(4, work)


def test_what_no_sync_left_is_reduced_once() -> None:
    def work(backend: Backend) -> None:
        model = FSDP(Stack(), backend, units=[Layer])
        square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        once = backend.telemetry.ops["reduce_scatter"].count
        with model.no_sync():
            square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        assert backend.telemetry.ops["reduce_scatter"].count == 2 * once

    run_ranks(2, work)


@pytest.mark.parametrize("strategy", [FULL, GRAD, NONE])
def test_they_are_reduced_once_although_their_unit_was_frozen_meanwhile(strategy: ShardingStrategy) -> None:
    """As in one process, where a gradient stays in `grad`; in a later step it would be one of other weights."""

    def freeze(model: nn.Module, frozen: bool) -> None:
        inner = model.module if isinstance(model, FSDP) else model
        assert isinstance(inner, Stack)
        inner.layers[1].requires_grad_(not frozen)

    def work(backend: Backend) -> None:
        model = FSDP(seeded(Stack)(), backend, units=[Layer], strategy=strategy)

        def step(*numbers: int) -> list[Tensor]:
            for number in numbers:
                square_loss(model, number + backend.rank).backward()  # type: ignore[no-untyped-call]
            found = [torch.zeros(0) if parameter.grad is None else parameter.grad for parameter in model.parameters()]
            for parameter in model.parameters():
                parameter.grad = None
            return found

        alone = step(0)
        later = step(10)
        with model.no_sync():
            square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
        freeze(model, True)
        together = step(10)
        freeze(model, False)
        for name, both, first, second in zip((name for name, _ in model.named_parameters()), together, alone, later, strict=True):
            torch.testing.assert_close(both, first if "layers.1." in name else first + second)
        for got, meant in zip(step(10), later, strict=True):
            torch.testing.assert_close(got, meant)

    run_ranks(2, work)


@pytest.mark.parametrize("strategy", [FULL, NONE])
def test_the_models_own_zero_grad_drops_them(strategy: ShardingStrategy) -> None:
    def work(backend: Backend) -> None:
        def gradients() -> list[Tensor]:
            square_loss(model, backend.rank).backward()  # type: ignore[no-untyped-call]
            return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

        model = FSDP(seeded(Stack)(), backend, units=[Layer], strategy=strategy)
        meant = gradients()
        model.zero_grad()
        with model.no_sync():
            square_loss(model, 7).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        found = gradients()
        assert len(found) == len(meant) > 0
        assert all(map(torch.equal, found, meant))

    run_ranks(2, work)
