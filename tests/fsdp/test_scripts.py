"""What docs/scripts.md says about a training script."""

import asyncio
import copy
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shardnet import AsyncFSDP, Cluster
from shardnet.errors import CollectiveMismatch, UsageError
from shardnet.testing import ClusterRunner
from tests.docs.test_blocks import ROOT, blocks
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches

DECAY, STEPS = 0.9, 4


async def trains(cluster: Cluster) -> list[dict[str, torch.Tensor]]:
    names: dict[str, Any] = {"torch": torch, "copy": copy}
    (program,) = blocks(ROOT / "docs" / "scripts.md")
    exec(program, names)
    module = make_gpt()
    average: AsyncFSDP = await names["average_of"](cluster, module, (Block,))
    model = await cluster.shard(module, (Block,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in token_batches(STEPS, 4):
        await model.backward(await model.run(loss_of, model.fsdp, batch.chunk(2)[cluster.rank]))
        await model.step(optimizer)
        optimizer.zero_grad()
        names["follow"](average, model, DECAY)
    return [await average.full_state_dict()]


def test_an_average_of_the_weights(runner: ClusterRunner) -> None:
    model = make_gpt()
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(DECAY))  # type: ignore[no-untyped-call]
    average.n_averaged.fill_(1)  # it begins as the model does
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in token_batches(STEPS, 4):
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    for (found,) in runner.run(trains, 2, processes=True):
        for name, value in average.module.state_dict().items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)


async def shards_at_once(cluster: Cluster) -> list[float]:
    models = await asyncio.gather(*(cluster.shard(torch.nn.Linear(4, 4)) for _ in range(5)))
    outputs = await asyncio.gather(*(model(torch.ones(1, 4)) for model in models))
    return [output.sum().item() for output in outputs]


def test_several_models_may_be_sharded_at_the_same_time(runner: ClusterRunner) -> None:
    first, second = runner.run(shards_at_once, 2)
    assert first == second
    assert len(set(first)) == 5


async def cancels_one(cluster: Cluster) -> list[list[float]]:
    """Rank 1 is slow with the first collective, and both ranks cancel it; a second one of the same kind must not overtake it."""
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def ignored() -> Iterator[torch.nn.Module]:
        loop.call_soon_threadsafe(began.set)
        if cluster.rank:
            time.sleep(0.5)  # it is the slowness that is tested
        yield from ()

    def linear(weight: float) -> torch.nn.Linear:
        layer = torch.nn.Linear(4, 4)
        torch.nn.init.constant_(layer.weight, weight)
        return layer

    first = asyncio.ensure_future(cluster.shard(linear(1.0), ignored_modules=ignored()))
    await began.wait()
    first.cancel()
    second = await cluster.shard(linear(2.0))
    await asyncio.gather(first, return_exceptions=True)
    return [(await second.full_state_dict())["weight"].unique().tolist()]


def test_one_that_is_cancelled_keeps_its_turn(runner: ClusterRunner) -> None:
    assert runner.run(cancels_one, 2) == [[[2.0]]] * 2


async def refused_once(cluster: Cluster) -> float:
    """A rank that first gives wrong arguments meets the others once its arguments are right."""
    if cluster.rank:
        with pytest.raises(UsageError, match="units"):
            await cluster.shard(torch.nn.Linear(4, 4), units=[torch.nn.Conv2d])
    model = await cluster.shard(torch.nn.Linear(4, 4))
    return float((await model(torch.ones(1, 4))).sum().item())


def test_arguments_that_are_refused_on_one_rank_cost_no_turn(runner: ClusterRunner) -> None:
    first, second = runner.run(refused_once, 2)
    assert first == second


async def mixes_up(cluster: Cluster) -> list[float | None]:
    async def mean(value: float, label: str) -> float | None:
        with pytest.raises(CollectiveMismatch, match=r"of (loss|accuracy) but rank \d .* of (accuracy|loss)"):
            return await cluster.mean(value, label=label)
        return None

    tasks = [mean(1.0, "loss"), mean(100.0, "accuracy")]
    return list(await asyncio.gather(*(tasks if cluster.rank == 0 else reversed(tasks)), cluster.mean(2.0)))


def test_means_of_several_tasks_are_told_apart_by_their_labels(runner: ClusterRunner) -> None:
    assert runner.run(mixes_up, 2) == [[None, None, 2.0]] * 2
