"""Programs with collectives that torch compiles; run by forked ranks. Each must do the same as without the compiler."""

# mypy: disable-error-code="attr-defined, call-overload, no-untyped-call, arg-type, union-attr, no-any-return, assignment"

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.interop import programs

Tensor = torch.Tensor
STEPS = 3


def main(folder: str, world_size: str, name: str, *environment: str) -> int:
    """Run one of the programs below on so many ranks, in an environment with NAME=VALUE; returns how many failed."""
    os.environ |= dict(each.split("=", 1) for each in environment)
    warnings.filterwarnings("ignore", category=FutureWarning)  # names from before torch 2.13, which dynamo itself still puts into graphs
    return programs.launch(globals()[name], folder, int(world_size))


def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function as dynamo compiles it, with graphs that run unchanged."""
    return torch.compile(function, backend="eager")


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)], nn.Linear(6, 1))


def _losses(model: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], rank: int) -> list[float]:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def ddp(rank: int, world_size: int, _: Path) -> None:
    plain, model = DistributedDataParallel(_module()), DistributedDataParallel(_module())
    without = _losses(plain, list(plain.parameters()), rank)
    assert _losses(compiled(model), list(model.parameters()), rank) == without


def fsdp2(rank: int, world_size: int, _: Path) -> None:
    def sharded() -> nn.Module:
        module = _module()
        for part in module:
            fully_shard(part)
        fully_shard(module)
        return module

    plain, model = sharded(), sharded()
    without = _losses(plain, list(plain.parameters()), rank)
    assert _losses(compiled(model), list(model.parameters()), rank) == without


def whole_steps(rank: int, world_size: int, _: Path) -> None:
    """DDP's backward and the optimizer are within the compiled code."""

    def losses(compiler: Callable[..., Callable[..., Tensor]]) -> list[Tensor]:
        model = DistributedDataParallel(_module())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = compiler(step)
        return [run(torch.full((4, 6), float(number + rank))) for number in range(STEPS)]

    assert losses(compiled) == losses(lambda step: step)


def functional_collectives(rank: int, world_size: int, _: Path) -> None:
    """They are in one graph, with gradients."""
    half = dist.new_group([0, 1])

    def compute(x: Tensor) -> Tensor:
        total = functional.all_reduce(x.detach() * 2, "sum", dist.group.WORLD)  # this one has no gradients
        every = functional.all_gather_tensor_autograd(total + x, 0, dist.group.WORLD)
        part = functional.reduce_scatter_tensor_autograd(every, "sum", 0, dist.group.WORLD)
        swapped = functional.all_to_all_single_autograd(part, None, None, dist.group.WORLD)
        return swapped.relu() + functional.broadcast(x.detach(), 1, half)

    if rank in (0, 1):
        for size in (2, 3):
            with_it, without = (torch.arange(6.0 * size).requires_grad_() for _ in range(2))
            one, other = torch.compile(compute, backend="aot_eager", fullgraph=True)(with_it), compute(without)
            assert torch.equal(one, other)
            one.sum().backward()
            other.sum().backward()
            assert torch.equal(with_it.grad, without.grad)


def plain_collectives(rank: int, world_size: int, _: Path) -> None:
    """They are called as programs usually do, including those that dynamo cannot put into a graph."""

    def compute(x: Tensor) -> Tensor:
        x = x * 2
        dist.all_reduce(x)
        every = torch.empty(world_size * x.numel())
        dist.all_gather_into_tensor(every, x)
        work = dist.broadcast(every, src=1, async_op=True)
        work.wait()
        parts = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(parts, x + 1)
        if rank:
            dist.send(parts[0], 0)
        else:
            dist.recv(parts[0], 1)
        dist.barrier()
        return torch.cat([every, *parts]) + 1

    for size in (4, 5, 6):
        x = torch.arange(float(size)) + rank
        assert torch.equal(compiled(compute)(x), compute(x))


def tensor_parallel(rank: int, world_size: int, _: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(3, 4)
    whole = module(x)
    model = parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    found = compiled(model)(x)
    torch.testing.assert_close(found, whole)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
