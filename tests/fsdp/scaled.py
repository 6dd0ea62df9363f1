"""A model whose gradient is what goes in, and what of it is sent."""

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP
from shardnet.telemetry import OpCounter

Tensor = torch.Tensor


class Scaled(nn.Module):
    """y = w . x: the gradient of w is x."""

    def __init__(self, numel: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def gradient(model: FSDP, x: Tensor) -> Tensor:
    """This rank's part of the gradient of a step with x."""
    (weight,) = model.parameters()
    weight.grad = None
    model(x).backward()
    (received,) = (parameter.grad for parameter in model.parameters())
    assert received is not None
    return received


def counted(backend: Backend, op: str) -> OpCounter:
    return backend.telemetry.ops.get(op, OpCounter())
