"""A training for tests whose members die at given places, and the check of what its survivors must have seen."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from torch import nn

from shardnet import Cluster, ShardingStrategy
from shardnet.elastic import State
from shardnet.loop import LoopThread
from shardnet.rendezvous.client import status
from tests.elastic.crew import Died, Life, Train, alone, batch, loss_of, net, same, whole

STEPS = 8
TOLD = 2  # steps done when the order comes
LEFT = TOLD + 2  # steps done when it is obeyed
Event = Callable[[str, int], None]  # what happens at a place of a step


def dies(place: str, step: int) -> Event:
    def happen(now: str, at: int) -> None:
        if (now, at) == (place, step):
            raise Died

    return happen


def lives(_: str, __: int) -> None:
    """The event of a member that lives: nothing happens."""


def trainer(
    event: Event = lives,
    *,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    intra_node_size: int | None = None,
    steps: int = STEPS,
    before: Callable[[int], Awaitable[None]] | None = None,
    make: Callable[[], nn.Module] = net,
) -> Train:
    async def train(cluster: Cluster, state: State, life: Life) -> dict[str, torch.Tensor]:
        model = await cluster.shard(make(), units=(nn.Sequential,), strategy=strategy, intra_node_size=intra_node_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        await state.resume(model, optimizer)
        life.epochs.append((cluster.topology.epoch, cluster.rank, cluster.world_size, state.step))
        for undone in [step for step in life.states if step > state.step]:
            del life.states[undone]  # by fewer workers it comes out otherwise in the last bits
        life.states.setdefault(state.step, []).append(await whole(model, optimizer))
        while state.step < steps:
            if before is not None:
                await before(state.step)
            event("begin", state.step)
            inputs = batch(state.step)
            loss = loss_of(await model(inputs), inputs)
            event("backward", state.step)
            await model.backward(loss)
            event("step", state.step)
            await model.step(optimizer)
            optimizer.zero_grad()
            event("commit", state.step)
            await state.commit(state.step + 1)
            event("committed", state.step)
            life.states.setdefault(state.step, []).append(await whole(model, optimizer))
        return await model.full_state_dict()

    return train


def told(*ranks: int, dies: int | None = None, **strategy: Any) -> Train:
    """Trainers, some of which are told to leave while one dies before they can. `strategy`, as for `trainer`: in the first epoch."""

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        rank, is_first = cluster.rank, cluster.topology.epoch == 1

        def event(place: str, step: int) -> None:
            if place == "begin" and is_first and step == TOLD and rank in ranks:
                assert life.departure.ask()
            if place == "begin" and is_first and step == TOLD + 1 and rank == dies:
                raise Died

        return await trainer(event, **(strategy if is_first else {}))(cluster, state, life)

    return train


def check(survivors: list[Life], steps: int = STEPS) -> None:
    """Check that all have seen the same bits at the same steps, and end where one process does."""
    for step in range(steps + 1):
        seen = [state for life in survivors for state in life.states.get(step, [])]
        assert all(same(seen[0], state) for state in seen), f"states of step {step} differ"
    expected = alone(steps)
    for life in survivors:
        assert life.error is None
        for name, value in expected.items():
            torch.testing.assert_close(life.result[name], value, rtol=0, atol=2e-6)


async def joined(address: str) -> int:
    (job,) = await LoopThread.shared().run_here(status(address))
    return job.joined


async def until_joined(address: str, count: int) -> None:
    """Wait until the rendezvous has this many workers, with or without ranks."""
    while await joined(address) < count:  # noqa: ASYNC110 - it tells its members, and nobody who looks on
        await asyncio.sleep(0)
