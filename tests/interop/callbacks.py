"""Programs whose callbacks on futures themselves call collectives and wait for them; run by forked ranks."""

# mypy: disable-error-code="attr-defined, call-overload, no-untyped-call, arg-type, union-attr, no-any-return"

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook, quantization_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.interop import programs


def main(folder: str, world_size: str, name: str) -> int:
    """Run one of the programs below on `world_size` ranks; return how many ranks failed."""
    return programs.launch(globals()[name], folder, int(world_size))


def chained(rank: int, world_size: int, _: Path) -> None:
    """Callbacks in callbacks, three deep."""

    def deeper(done: Any, levels: int) -> torch.Tensor:
        future = dist.all_reduce(done.value()[0], async_op=True).get_future()
        return future.then(lambda each: [deeper(each, levels - 1)]).wait()[0] if levels else future.wait()[0]

    for number in (1.0, 2.0):  # one after the other: otherwise a call might come before a callback on one rank and after it on another
        future = dist.all_reduce(torch.full((4,), number), async_op=True).get_future().then(lambda done: deeper(done, 2))
        assert future.wait().tolist() == [number * world_size**4] * 4
    work = dist.all_reduce(torch.ones(2), async_op=True)
    first = work.get_future()
    assert work.get_future() is first
    assert first.then(lambda _: work.get_future().wait()[0] + 1).wait().tolist() == [world_size + 1.0] * 2


def power_sgd(rank: int, world_size: int, _: Path) -> None:
    """For gradients of rank 1 (as matrices) it is exact; for others every rank has the same result."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, use_error_feedback=False)
    gradients = _gradients(rank, world_size, 4, lambda model: model.register_comm_hook(state, powerSGD_hook.powerSGD_hook))
    for found, plain in gradients:
        torch.testing.assert_close(found, plain)


def quantized(rank: int, world_size: int, _: Path) -> None:
    for hook in (quantization_hooks.quantization_pertensor_hook, quantization_hooks.quantization_perchannel_hook):
        gradients = _gradients(rank, world_size, 2, partial(DistributedDataParallel.register_comm_hook, state=dist.group.WORLD, hook=hook))
        for found, plain in gradients:
            torch.testing.assert_close(found, plain, rtol=0, atol=0.02 * float(plain.abs().max()))


def _gradients(
    rank: int, world_size: int, steps: int, register: Callable[[DistributedDataParallel], None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients with a hook and without, of a layer whose gradient is a matrix of rank 1: all ranks have one sample of one direction."""
    torch.manual_seed(3)
    model = DistributedDataParallel(nn.Linear(64, 64, bias=False))
    register(model)
    found = []
    for step in range(steps):
        sample = torch.randn(1, 64, generator=torch.Generator().manual_seed(step)) * (rank + 1)
        model.zero_grad()
        model(sample).sum().backward()
        plain = torch.ones(64, 1) @ sample / (rank + 1) * (sum(range(1, world_size + 1)) / world_size)
        found.append((model.module.weight.grad.clone(), plain))
    return found
