"""Trainings that run with torch's own sharding, with ours, and in one process."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import NamedTuple

import torch
from torch import nn

from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import GPT, loss_of, make_gpt, token_batches
from tests.fsdp.training import SAMPLES, optimizer_for

STEPS = 3  # both optimizers have state from the first step on
OPTIMIZERS = ("adamw", "sgd")
MICRO_BATCHES = (1, 3)


class Case(NamedTuple):
    """One training."""

    world_size: int
    optimizer: str
    micro_batches: int
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD
    dtype: str = "float32"  # of the computation; parameters are float32

    @property
    def node(self) -> int | None:
        """How many ranks a node has, if the strategy uses nodes."""
        return 2 if self.strategy is ShardingStrategy.HYBRID_SHARD else None

    def __str__(self) -> str:
        return "-".join(map(str, (self.strategy, self.dtype, self.world_size, self.optimizer, self.micro_batches)))


FLOAT32 = [
    Case(world_size, *how, strategy)
    for strategy in ShardingStrategy
    for world_size in ((4,) if strategy is ShardingStrategy.HYBRID_SHARD else (1, 2, 3, 4))
    for how in product(OPTIMIZERS, MICRO_BATCHES)
]
BFLOAT16 = [Case(*values, dtype="bfloat16") for values in product((3, 4), OPTIMIZERS, MICRO_BATCHES)]


def make_small() -> GPT:
    return make_gpt(layers=2)


def train_share(
    model: nn.Module,
    rank: int,
    case: Case,
    no_sync: Callable[[], AbstractContextManager[None]],
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    """The losses of this rank's share of each batch; all micro-batches but the last of a step are within `no_sync`."""
    optimizer = optimizer or optimizer_for(model.parameters(), case.optimizer)
    share = SAMPLES // case.world_size
    losses = []
    for batch in token_batches(STEPS, SAMPLES):
        total = 0.0
        parts = batch[rank * share :][:share].tensor_split(case.micro_batches)
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else no_sync():
                loss = len(part) / share * loss_of(model, part)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
