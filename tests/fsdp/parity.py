"""Comparing a sharded model with the same model in one process."""

from collections.abc import Callable

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from tests.fsdp.ranks import run_ranks

Tensor = torch.Tensor
LossOf = Callable[[nn.Module, int], Tensor]  # (model, rank) -> loss on that rank's data
Train = Callable[[FSDP, int], None]  # (model, rank): does something that leaves gradients on the parameters


def check_gradients(model: FSDP, alone: nn.Module, rank: int, *, atol: float = 1e-6) -> None:
    """Check that this rank's gradients are its slices of `alone`'s; zeros where that has none, and None for frozen parameters."""
    whole = dict(alone.named_parameters(remove_duplicate=False))
    for group in model.groups:
        for placed, piece in zip(group.placed, group.layout.slices(rank), strict=True):
            reference = whole[placed.name]
            if not reference.requires_grad:
                assert placed.parameter.grad is None, placed.name
                continue
            expected = torch.zeros_like(reference) if reference.grad is None else reference.grad
            assert placed.parameter.grad is not None, placed.name
            torch.testing.assert_close(placed.parameter.grad, expected.reshape(-1)[piece.start : piece.stop], rtol=1e-5, atol=atol)


def check_at_rest(model: FSDP) -> None:
    """Check that nothing full-size is left, and that the modules hold the sharded originals."""
    assert model.memory.full_parameters.current_bytes == 0
    assert model.memory.full_gradients.current_bytes == 0
    for group in model.groups:
        for placed in group.placed:
            for slot in placed.slots:
                assert getattr(slot.module, slot.attribute) is placed.parameter
            assert placed.parameter.dim() == 1


def plain_step(loss_of: LossOf) -> Train:
    def train(model: FSDP, rank: int) -> None:
        loss_of(model, rank).backward()  # type: ignore[no-untyped-call]

    return train


def check_against_one_process(
    world_size: int,
    make: Callable[[], nn.Module],
    loss_of: LossOf,
    *,
    units: Callable[[str, nn.Module], bool] | list[type[nn.Module]],
    train: Train | None = None,
    prefetch: int = 1,
    repeats: int = 2,
) -> None:
    """Check that gradients on `world_size` ranks equal those of the mean of the ranks' losses in one process; more than once."""
    alone = make()
    torch.stack([loss_of(alone, rank) for rank in range(world_size)]).mean().backward()  # type: ignore[no-untyped-call]
    models = [make() for _ in range(world_size)]

    def work(backend: Backend) -> None:
        model = FSDP(models[backend.rank], backend, units=units, prefetch=prefetch)
        for _ in range(repeats):
            (train or plain_step(loss_of))(model, backend.rank)
            check_gradients(model, alone, backend.rank)
            check_at_rest(model)
            model.zero_grad()

    run_ranks(world_size, work)
