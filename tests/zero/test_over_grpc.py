"""The sharded optimizer over gRPC streams gives the bits that it gives in memory."""

import asyncio

import torch

from shardnet.testing import local_cluster
from tests.zero.training import train_rank, train_sharded

WORLD_SIZE = 3


async def test_the_transport_changes_no_bit() -> None:
    in_memory = (await asyncio.to_thread(train_sharded, WORLD_SIZE, "adamw"))[0].parameters
    async with local_cluster(WORLD_SIZE) as backends:
        runs = await asyncio.gather(*(asyncio.to_thread(train_rank, backend, "adamw") for backend in backends))
    for run in runs:
        assert all(torch.equal(value, in_memory[name]) for name, value in run.parameters.items())
