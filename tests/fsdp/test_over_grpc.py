"""Sharded training over gRPC streams is sharded training in memory, bit for bit."""

import asyncio

import torch

from shardnet.testing import local_cluster
from tests.fsdp.training import train_async, train_sharded

WORLD_SIZE = 3


async def test_the_transport_changes_no_bit() -> None:
    in_memory = (await asyncio.to_thread(train_sharded, WORLD_SIZE))[0].state
    async with local_cluster(WORLD_SIZE) as backends:
        states = await asyncio.gather(*(train_async(backend) for backend in backends))
    for state in states:
        assert list(state) == list(in_memory)
        assert all(torch.equal(value, in_memory[name]) for name, value in state.items())
