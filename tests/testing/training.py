"""What the tests of the test kit run on ranks. It is at the top of a module, so that other processes find it."""

import asyncio
import functools
import os
import signal
import subprocess
import threading
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardnet import Cluster
from shardnet.elastic import State

STEPS = 6


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))


def net() -> nn.Module:
    """The same model on each rank, whatever else draws random numbers meanwhile."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.2, 0.2, generator=generator)
    return model


async def train(cluster: Cluster, steps: int = STEPS) -> dict[str, torch.Tensor]:
    model = await cluster.shard(net(), units=(nn.Sequential,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs = batch(step)
        await model.backward(F.mse_loss(await model(inputs), inputs.sum(dim=1, keepdim=True)))
        await model.step(optimizer)
        optimizer.zero_grad()
        cluster.report(step=step + 1)
    return await model.full_state_dict()


async def train_elastically(cluster: Cluster, state: State) -> tuple[int, int, dict[str, torch.Tensor]]:
    """World size and step at the end, and what was learnt."""
    model = await cluster.shard(net(), units=(nn.Sequential,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    await state.resume(model, optimizer)
    while state.step < STEPS:
        inputs = batch(state.step)
        await model.backward(F.mse_loss(await model(inputs), inputs.sum(dim=1, keepdim=True)))
        await model.step(optimizer)
        optimizer.zero_grad()
        await state.commit(state.step + 1)
    return cluster.world_size, state.step, await model.full_state_dict()


async def whereabouts(cluster: Cluster, *facts: Any) -> dict[str, Any]:
    """Where a rank is, and what it was given."""
    print(f"hello from rank {cluster.rank}")
    nodes = len({member.node for member in cluster.topology.members})
    return {"rank": cluster.rank, "nodes": nodes, "pid": os.getpid(), "thread": threading.get_ident(), "facts": facts}


def blocking(cluster: Cluster) -> float:
    """A plain function, not a coroutine: it blocks its thread until all ranks are there."""
    return cluster.backend.all_reduce(torch.ones(1)).wait().item()


async def fails_on_rank_1(cluster: Cluster) -> None:
    await cluster.backend.barrier()  # otherwise a worker may lose rank 1 before it has joined itself, and fail as no rank
    if cluster.rank == 1:
        raise LookupError("no such column: price")
    await cluster.backend.barrier()


async def dies_on_rank_1(cluster: Cluster) -> None:
    await cluster.backend.barrier()
    if cluster.rank == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    await cluster.backend.barrier()


async def one_waits_for_ever(cluster: Cluster) -> None:
    if cluster.rank == 1:
        await asyncio.Event().wait()
    await cluster.backend.barrier(timeout_s=60.0)


async def returns_a_thread(cluster: Cluster) -> object:
    return threading.current_thread()


async def counts(cluster: Cluster, steps: int) -> list[float]:
    """How long each step took."""
    took_s = []
    for step in range(steps):
        begin_s = time.monotonic()
        await cluster.backend.all_reduce(torch.ones(200_000))
        took_s.append(time.monotonic() - begin_s)
        cluster.report(step=step + 1)
    return took_s


def leaves_a_child(cluster: Cluster) -> int:
    """The child inherits all that this process has, except the socket to the test."""
    return subprocess.Popen(["sleep", "60"]).pid


def forks_a_child(cluster: Cluster) -> int:
    """The child inherits all that this process has."""
    if child := os.fork():
        return child
    time.sleep(60.0)
    os._exit(0)


async def raises_what_has_no_text(cluster: Cluster) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    raise Odd


def _renamed(function: Any) -> Any:
    @functools.wraps(function)
    async def another(cluster: Cluster) -> str:
        return "another"

    return another


wrapped = _renamed(train)  # its __name__ is train, but the module's `train` is another function


class Method:
    async def train(self, cluster: Cluster) -> None:
        """A method of an object that no other process has."""
