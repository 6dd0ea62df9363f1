"""Small models of three layers and a head, for what autograd and users do to a model between forward and step."""

from collections.abc import Callable

import torch
from torch import nn

from shardnet.fsdp import FSDP
from tests.devices import on_test_device
from tests.fsdp import models

Tensor = torch.Tensor
WIDTH = 5


class Layer(nn.Module):
    """A residual layer with an odd number of parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.scale


class Stack(nn.Module):
    """Three layers and a head; `forward` is what the tests vary."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def layer(self, index: int) -> Layer:
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


def stack_of(model: nn.Module) -> Stack:
    inner = model.module if isinstance(model, FSDP) else model
    assert isinstance(inner, Stack)
    return inner


def seeded(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Makes the same model each time, in several threads at once too."""

    def make() -> nn.Module:
        with models.seeded(3):
            return kind()

    return make


def data(rank: int, width: int = WIDTH) -> Tensor:
    return on_test_device(torch.randn(4, width, generator=torch.Generator().manual_seed(100 + rank), device="cpu"))


def square_loss(model: nn.Module, rank: int) -> Tensor:
    loss: Tensor = model(data(rank)).square().mean()
    return loss
