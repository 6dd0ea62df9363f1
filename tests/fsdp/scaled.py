"""A model whose gradient is its input, and what ranks get of that gradient."""

import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.fsdp import FSDP, Compression, GradScaler
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


def scaled_steps(backend: Backend, compression: Compression, numel: int, broken_rank: int, planted: float) -> list[tuple[float, float]]:
    """Two steps with a GradScaler, of which the first has `planted` among one rank's gradients; scale and first weight after each."""
    model = FSDP(Scaled(numel), backend, compression=compression)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), GradScaler(backend, init_scale=1024.0)
    (weight,) = model.parameters()
    results = []
    for is_broken in (True, False):
        x = torch.full((numel,), planted if is_broken and backend.rank == broken_rank else 1.0)
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        results.append((scaler.get_scale(), weight[0].item()))
    return results


def counted(backend: Backend, op: str) -> OpCounter:
    return backend.telemetry.ops.get(op, OpCounter())
