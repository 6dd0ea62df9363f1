"""A model that nobody uses any more is gone when Python's collector has run once, however deep it is."""

import asyncio
import gc
import weakref

import pytest
import torch

from shardnet.backend import Backend, LoopbackBackend
from shardnet.fsdp import AsyncFSDP
from shardnet.fsdp.runtime import forget_graphs
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches

LAYERS = 6


async def train(backend: Backend, *, backward: bool) -> "tuple[weakref.ref[torch.nn.Module], torch.Tensor]":
    """Train until the epoch ends, after a step or in the middle of one; return the loss, which is all that is left of the model."""
    model = await AsyncFSDP(make_gpt(layers=LAYERS), backend, units=[Block])
    loss = await model.run(loss_of, model.fsdp, token_batches(1, 1)[0])
    if backward:
        await model.backward(loss)
    await model.aclose()
    return weakref.ref(model.fsdp.module), loss.detach()


@pytest.mark.parametrize("backward", [True, False])
async def test_one_run_of_the_collector_is_enough(backward: bool) -> None:
    (backend,) = LoopbackBackend.create_group(1)
    model, _ = await train(backend, backward=backward)
    gc.collect()
    assert model() is not None, "this has shown nothing: a layer at a time would do"
    forget_graphs(backend)
    gc.collect()
    assert model() is None
    await backend.aclose()


async def test_graphs_of_other_backends_stay() -> None:
    """Two ranks of one process, one of which has ended its epoch."""
    (mine,), (theirs,) = LoopbackBackend.create_group(1), LoopbackBackend.create_group(1)
    async with AsyncFSDP(make_gpt(layers=2), theirs, units=[Block]) as model:
        loss = await model.run(loss_of, model.fsdp, token_batches(1, 1)[0])
        await train(mine, backward=True)
        forget_graphs(mine)
        assert any(call.hooks for call in model.fsdp._runtime._traced)
        await model.backward(loss)
        assert all(each.grad is not None for each in model.parameters())
    await asyncio.gather(mine.aclose(), theirs.aclose())
