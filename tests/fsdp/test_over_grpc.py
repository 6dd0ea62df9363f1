"""Sharded training over gRPC streams is sharded training in memory, bit for bit."""

import asyncio

import torch

from shardnet.backend import Backend
from shardnet.fsdp import AsyncFSDP
from shardnet.testing import local_cluster
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.training import SAMPLES, STEPS, optimizer_for, train_sharded

WORLD_SIZE = 3


async def train(backend: Backend) -> dict[str, torch.Tensor]:
    share = SAMPLES // WORLD_SIZE
    async with AsyncFSDP(make_gpt(seed=backend.rank), backend, units=[Block]) as model:
        optimizer = optimizer_for(model.parameters())
        for batch in token_batches(STEPS, SAMPLES):
            loss = await model.run(loss_of, model.fsdp, batch[backend.rank * share :][:share])
            await model.backward(loss)
            await model.step(optimizer)
            optimizer.zero_grad()
        return await model.full_state_dict()


async def test_the_transport_changes_no_bit() -> None:
    in_memory = (await asyncio.to_thread(train_sharded, WORLD_SIZE))[0].state
    async with local_cluster(WORLD_SIZE) as backends:
        states = await asyncio.gather(*(train(backend) for backend in backends))
    for state in states:
        assert list(state) == list(in_memory)
        assert all(torch.equal(value, in_memory[name]) for name, value in state.items())
