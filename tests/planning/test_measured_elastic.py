"""Compare the planned copies of an elastic training with those that it makes."""

import asyncio

import pytest
import torch

from shardnet import Cluster, ShardingStrategy
from shardnet.elastic import State
from shardnet.planning import ModelSize, Setting, Strategy, plan
from shardnet.zero import ZeroOptimizer
from tests.elastic.crew import Life, crew
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches

SIZES = {"width": 132, "layers": 4}  # large enough that the bookkeeping (which bytes belong to what) hardly counts


def size() -> ModelSize:
    return ModelSize.of_module("gpt", make_gpt(**SIZES), Block)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.NO_SHARD, Strategy.ZERO_1])
async def test_the_copies_of_an_elastic_training(strategy: Strategy, ranks: int) -> None:
    (batch,) = token_batches(1, 2)

    async def sharded(cluster: Cluster, state: State, life: Life) -> int:
        model = await cluster.shard(make_gpt(**SIZES), units=(Block,), strategy=ShardingStrategy(strategy))
        optimizer = torch.optim.AdamW(model.parameters())
        await state.resume(model, optimizer)
        await model.backward(await model.run(loss_of, model.fsdp, batch))
        await model.step(optimizer)
        return await committed(state)

    async def whole(cluster: Cluster, state: State, life: Life) -> int:
        module = make_gpt(**SIZES)

        def make() -> ZeroOptimizer:
            return ZeroOptimizer(module.parameters(), torch.optim.AdamW, cluster.backend, module=module, units=[Block])

        optimizer = await asyncio.to_thread(make)
        await state.resume(module, optimizer)

        def step() -> None:
            torch.autograd.backward(loss_of(module, batch))
            optimizer.step()

        await asyncio.to_thread(step)
        return await committed(state)

    async def committed(state: State) -> int:
        for step in (1, 2):  # after two commits both copies hold an optimizer's state
            await state.commit(step)
        return state.nbytes

    (planned,) = plan(size(), Setting(ranks, elastic=True), [strategy])
    async with crew() as members:
        lives = [members.hire(whole if strategy is Strategy.ZERO_1 else sharded, least=ranks, most=ranks) for _ in range(ranks)]
        await members.wait()
    for life in lives:
        assert life.error is None
        assert planned.memory.copies == pytest.approx(life.result, rel=0.1)


def test_a_job_that_is_not_elastic_has_none() -> None:
    (planned,) = plan(size(), Setting(4), [Strategy.FULL_SHARD])
    assert planned.memory.copies == 0
