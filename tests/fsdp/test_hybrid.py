"""Sharded training with a torch engine inside nodes and our mesh across is training in one process."""

import asyncio

import torch

from shardnet.backend.hybrid_backend import HybridBackend
from shardnet.config import Limits
from shardnet.testing import same_bits
from tests.backend.torch_ranks import torch_cluster
from tests.fsdp.training import train_alone, train_async

WORLD_SIZE = 4
STEPS = 4
LIMITS = Limits(eager_bytes=64, inline_bytes=64)  # so that the small model's collectives count as large


async def test_training_over_two_nodes() -> None:
    alone = (await asyncio.to_thread(train_alone, steps=STEPS)).state
    async with torch_cluster(HybridBackend, WORLD_SIZE, ranks_per_node=2, limits=LIMITS) as backends:
        states = await asyncio.gather(*(train_async(backend, steps=STEPS) for backend in backends))
    for state in states:
        for name, value in state.items():
            assert same_bits(value, states[0][name])
            torch.testing.assert_close(value, alone[name], rtol=1e-4, atol=1e-5)
