"""A process that saves one checkpoint after another until it is killed, for test_kills.py."""

import asyncio
import sys
from pathlib import Path

import torch

from shardnet import AsyncFSDP
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints
from shardnet.testing import each_rank, loopback_cluster
from tests.fsdp.models import Weighted

RANKS, ELEMENTS = 3, 100_000


def values_at(step: int) -> torch.Tensor:
    return torch.full((ELEMENTS,), float(step))


async def load(backend: Backend, folder: Path, *, save: bool) -> int:
    """Load the checkpoint that is there and print its step; if asked, also save the next ones."""
    async with AsyncFSDP(Weighted(*([0.0] * ELEMENTS)), backend) as model:
        checkpoints = Checkpoints(backend, folder, model)
        found = await checkpoints.load()
        step = 0 if found is None else found.step
        parameter = next(model.parameters()).detach()
        assert torch.equal(parameter, values_at(step)[: parameter.numel()]), "a wrong load"
        while save:
            step += 1
            parameter.fill_(step)
            await checkpoints.save(step)
            await checkpoints.wait()
            if backend.rank == 0:
                sys.stdout.write(f"{step}\n")
                sys.stdout.flush()
        return step


async def at_work(folder: Path, *, save: bool) -> int:
    async with loopback_cluster(RANKS) as ranks:
        (step, *others) = await each_rank(ranks, lambda rank: load(rank, folder, save=save))
    assert all(other == step for other in others)
    return step


def begin(folder: str) -> int:
    asyncio.run(at_work(Path(folder), save=True))
    return 0
