"""A training whose losses do not depend on the number of ranks, nor on how they are sharded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardnet import AsyncFSDP, ShardingStrategy
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints
from tests.fsdp.models import GPT, Block, loss_of, make_gpt, token_batches

SAMPLES = 12
SIZES = {"width": 24, "layers": 2, "heads": 2}


@dataclass(frozen=True)
class Layout:
    """How many ranks, and what each of them holds."""

    ranks: int
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    per_node: int | None = None

    def __str__(self) -> str:
        return f"{self.ranks} {self.strategy.name}"


class Training:
    """One rank of it."""

    def __init__(self, backend: Backend, folder: Path, layout: Layout, *, seed: int = 0, keep: int = 2) -> None:
        self.backend = backend
        self.model = AsyncFSDP(self.module(seed), backend, units=[Block], strategy=layout.strategy, intra_node_size=layout.per_node)
        self._folder = folder
        self._keep = keep
        self.checkpoints: Any = None

    @staticmethod
    def module(seed: int = 0) -> GPT:
        return make_gpt(seed, **SIZES)

    async def __aenter__(self) -> "Training":
        await self.model.__aenter__()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.7)
        self.checkpoints = Checkpoints(self.backend, self._folder, self.model, self.optimizer, self.scheduler, keep=self._keep)
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.checkpoints.abandon()
        await self.model.__aexit__(*error)

    async def steps(self, first: int, last: int) -> list[float]:
        """Steps [first, last); the loss of each, over all ranks."""
        losses = []
        for step in range(first, last):
            batch = token_batches(last, SAMPLES)[step].chunk(self.backend.world_size)[self.backend.rank]
            loss = await self.model.run(loss_of, self.model.fsdp, batch)
            await self.model.backward(loss)
            await self.model.step(self.optimizer)
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(float((await self.backend.all_reduce(loss.detach().reshape(1))) / self.backend.world_size))
        return losses
