"""Activation checkpointing, around units, inside them and over several: gradients equal those of one process."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fsdp.parity import check_against_one_process
from tests.fsdp.stacks import WIDTH, Layer, Stack, data, seeded, square_loss

Tensor = torch.Tensor


class Checkpointed(Stack):
    """Each layer recomputed; `reentrant` chooses the implementation."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        out: Tensor = self.head(x)
        return out


class ReentrantCheckpointed(Checkpointed):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)  # reentrant checkpoints need an input that requires grad

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class CheckpointedInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False) * self.scale
        return out


class InsideStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CheckpointedInside() for _ in range(3))


class ReentrantInside(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=True) * self.scale
        return out


class ReentrantInsideStack(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(ReentrantInside() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class RegionOfUnits(Stack):
    """One checkpoint around several units."""

    def _region(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self._region, x, use_reentrant=False))
        return out


class ReentrantRegion(RegionOfUnits):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint(self._region, self.stem(x), use_reentrant=True))
        return out


@pytest.mark.parametrize("kind", [Checkpointed, ReentrantCheckpointed, InsideStack, ReentrantInsideStack, RegionOfUnits, ReentrantRegion])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_activation_checkpointing(kind: type[Stack], prefetch: int) -> None:
    check_against_one_process(2, seeded(kind), square_loss, units=[Layer], prefetch=prefetch)


def test_a_checkpoint_around_the_whole_model() -> None:
    def recomputed(model: nn.Module, rank: int) -> Tensor:
        loss: Tensor = checkpoint(model, data(rank), use_reentrant=False).square().mean()
        return loss

    check_against_one_process(2, seeded(Stack), recomputed, units=[Layer])
