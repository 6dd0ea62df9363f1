"""Training goes on when members die and when others come: the same state, the same steps, the same result."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch
from torch import nn

from shardnet import AsyncFSDP, Cluster, ShardingStrategy
from shardnet.backend.base import Backend
from shardnet.elastic import State
from shardnet.errors import CollectiveMismatch, JoinTimeout, StateError, StateLost, UsageError
from shardnet.loop import LoopThread
from shardnet.rendezvous.client import status
from shardnet.training.sampler import ShardedSampler
from shardnet.zero import ZeroOptimizer
from tests.elastic.crew import Died, Life, Train, alone, batch, crew, loss_of, net, same, train_step, whole

STEPS = 8
Event = Callable[[str, int], None]  # what happens at a place of a step


def dies(place: str, step: int) -> Event:
    def happen(now: str, at: int) -> None:
        if (now, at) == (place, step):
            raise Died

    return happen


def lives(_: str, __: int) -> None:
    """Nothing happens."""


def trainer(
    event: Event = lives,
    *,
    strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    intra_node_size: int | None = None,
    steps: int = STEPS,
    before: Callable[[int], Awaitable[None]] | None = None,
) -> Train:
    async def train(cluster: Cluster, state: State, life: Life) -> dict[str, torch.Tensor]:
        model = await cluster.shard(net(), units=(nn.Sequential,), strategy=strategy, intra_node_size=intra_node_size)
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


def check(survivors: list[Life], steps: int = STEPS) -> None:
    """They have all seen the same bits at the same steps, and end where one process does."""
    for step in range(steps + 1):
        seen = [state for life in survivors for state in life.states.get(step, [])]
        assert all(same(seen[0], state) for state in seen), f"states of step {step} differ"
    expected = alone(steps)
    for life in survivors:
        assert life.error is None
        for name, value in expected.items():
            torch.testing.assert_close(life.result[name], value, rtol=0, atol=2e-6)


@pytest.mark.parametrize("place", ["begin", "backward", "step", "commit", "committed"])
async def test_the_others_go_on_behind_the_last_committed_step(place: str) -> None:
    async with crew() as members:
        survivors = [members.hire(trainer(), least=2, most=4) for _ in range(3)]
        lost = members.hire(trainer(dies(place, 4)), least=2, most=4)
        await members.wait()
    assert isinstance(lost.error, Died)
    check(survivors)
    # who has died at "committed" has seen step 4 committed; otherwise 4 were, and the fifth was in flight
    for life in survivors:
        assert [(epoch, world, step) for epoch, _, world, step in life.epochs] == [(1, 4, 0), (2, 3, 4)]


@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        (ShardingStrategy.FULL_SHARD, None),
        (ShardingStrategy.SHARD_GRAD_OP, None),
        (ShardingStrategy.NO_SHARD, None),
        (ShardingStrategy.HYBRID_SHARD, 2),
    ],
)
async def test_a_whole_node_may_die_under_every_strategy(strategy: ShardingStrategy, size: int | None) -> None:
    both = asyncio.Barrier(2)  # one after the other would be three for a moment, which no nodes of two can be made of

    async def together(step: int) -> None:
        if step == 3:
            await both.wait()

    async with crew() as members:
        stays = trainer(strategy=strategy, intra_node_size=size)
        goes = trainer(dies("begin", 3), strategy=strategy, intra_node_size=size, before=together)
        make = [stays, stays, goes, goes]
        lives_ = [members.hire(train, least=2, most=4, node=f"node{place // 2}") for place, train in enumerate(make)]
        await members.wait()
    check(lives_[:2])
    for life in lives_[:2]:
        assert [(world, step) for _, _, world, step in life.epochs] == [(4, 0), (2, 3)]


async def test_losses_one_after_the_other_down_to_one_worker() -> None:
    async with crew() as members:
        events = [lives, dies("backward", 2), dies("commit", 4), dies("begin", 6)]
        lives_ = [members.hire(trainer(event), least=1, most=4) for event in events]
        await members.wait()
    check(lives_[:1])
    assert [(world, step) for _, _, world, step in lives_[0].epochs] == [(4, 0), (3, 2), (2, 4), (1, 6)]


async def test_a_loss_while_the_state_is_being_resumed() -> None:
    """One dies in a step, and another one before it has resumed in the next epoch: what is left of the first epoch must serve again."""

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        former = life.epochs[0][1] if life.epochs else cluster.rank
        if cluster.topology.epoch == 2 and former == 2:
            raise Died
        return await trainer(dies("step", 3) if former == 0 else lives)(cluster, state, life)

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=4) for _ in range(4)]
        await members.wait()
    check([life for life in lives_ if life.error is None])
    assert sorted(life.epochs[0][1] for life in lives_ if life.error is None) == [1, 3]
    assert {life.epochs[-1][2:] for life in lives_ if life.error is None} == {(2, 3)}


async def test_a_worker_that_comes_later_is_taken_in_after_a_step() -> None:
    seen, comes = asyncio.Event(), asyncio.Event()

    async def wait_for_it(step: int) -> None:
        if step == 3:
            seen.set()
            await comes.wait()

    async with crew() as members:
        first = [members.hire(trainer(before=wait_for_it), least=1, most=2)]
        await seen.wait()
        later = members.hire(trainer(), least=1, most=2)
        while await _joined(members.address) != 2:
            continue
        comes.set()
        await members.wait()
    check([*first, later])
    assert [(world, step) for _, _, world, step in first[0].epochs] == [(1, 0), (2, 4)]
    assert [(world, step) for _, _, world, step in later.epochs] == [(2, 4)]


async def _joined(address: str) -> int:
    (job,) = await LoopThread.shared().run_here(status(address))
    return job.joined


async def test_a_spare_takes_the_place_of_a_lost_one() -> None:
    async with crew() as members:
        lives_ = [members.hire(trainer(event), least=2, most=2) for event in (lives, dies("step", 5), lives)]
        await members.wait()
    dead = [life for life in lives_ if isinstance(life.error, Died)]
    if dead:  # else the one that dies was the spare, and never had a turn
        survivors = [life for life in lives_ if life.error is None]
        check(survivors)
        assert sorted(life.epochs[-1][3] for life in survivors) == [5, 5]


async def test_without_enough_workers_the_rest_gives_up_in_words() -> None:
    async with crew() as members:
        one = members.hire(trainer(), least=2, most=2)
        other = members.hire(trainer(dies("step", 1)), least=2, most=2)
        await members.wait()
    assert isinstance(other.error, Died)
    assert isinstance(one.error, JoinTimeout)
    assert "only 1 of 2 elastic workers joined" in str(one.error)


async def test_more_losses_than_copies_are_said_so() -> None:
    """Two neighbours at once: what the first held is gone with the second, which had the copy."""
    both = asyncio.Barrier(2)

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        async def together(step: int) -> None:
            if step == 3:
                await both.wait()

        if cluster.rank in (1, 2) and cluster.topology.epoch == 1:
            return await trainer(dies("begin", 3), before=together)(cluster, state, life)
        return await trainer()(cluster, state, life)

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=4) for _ in range(4)]
        await members.wait()
    lost = [life.error for life in lives_ if isinstance(life.error, StateLost)]
    assert len(lost) == 2
    assert "the state of step 3 (epoch 1) is lost: more workers are gone than there were copies" in str(lost[0])


async def test_every_other_step_may_be_committed() -> None:
    async with crew() as members:
        survivors = [members.hire(trainer(), least=2, most=3, every=3) for _ in range(2)]
        members.hire(trainer(dies("begin", 5)), least=2, most=3, every=3)
        await members.wait()
    check(survivors)
    assert [step for *_, step in survivors[0].epochs] == [0, 3]


async def test_an_error_of_the_training_itself_is_not_taken_for_a_loss() -> None:
    async def fails(cluster: Cluster, state: State, life: Life) -> None:
        raise ValueError("a mistake")

    async with crew() as members:
        lives_ = [members.hire(fails, least=2, most=2) for _ in range(2)]
        await members.wait()
    assert [str(life.error) for life in lives_] == ["a mistake", "a mistake"]


# --- what goes through it


async def test_zero_optimizers_and_their_modules_go_through_it() -> None:
    def trainer_of(event: Event) -> Train:
        async def train(cluster: Cluster, state: State, life: Life) -> dict[str, torch.Tensor]:
            module = net()
            seen = torch.zeros(1)
            module.register_buffer("seen", seen)
            make = lambda backend: ZeroOptimizer(  # noqa: E731 - runs in a thread
                module.parameters(), torch.optim.AdamW, backend, module=module, units=[nn.Sequential], lr=1e-2
            )
            optimizer = await asyncio.to_thread(make, cluster.backend)
            await state.resume(module, optimizer)
            life.epochs.append((cluster.topology.epoch, cluster.rank, cluster.world_size, state.step))
            while state.step < STEPS:
                await asyncio.to_thread(_zero_step, module, optimizer, state.step, event)
                seen += 1
                await state.commit(state.step + 1)
            optimizer.wait()
            life.states[0] = [{"seen": seen.clone()}]
            return {name: value.clone() for name, value in module.state_dict().items() if name != "seen"}

        return train

    async with crew() as members:
        survivors = [members.hire(trainer_of(lives), least=2, most=3) for _ in range(2)]
        members.hire(trainer_of(dies("step", 4)), least=2, most=3)
        await members.wait()
    check(survivors)
    assert [(world, step) for _, _, world, step in survivors[0].epochs] == [(3, 0), (2, 4)]
    assert survivors[0].states[0][0]["seen"].item() == STEPS


def _zero_step(module: nn.Module, optimizer: ZeroOptimizer, step: int, event: Event) -> None:
    inputs = batch(step)
    torch.autograd.backward(loss_of(module(inputs), inputs))
    event("step", step)
    optimizer.step()
    optimizer.zero_grad()


async def test_what_no_optimizer_steps_and_schedulers_of_schedulers_go_through_it() -> None:
    """Averages of parameters, parameters that nobody has given to an optimizer, and states of more than dicts."""
    found: list[tuple[float, float, float]] = []

    def trainer_of(event: Event) -> Train:
        async def train(cluster: Cluster, state: State, life: Life) -> None:
            model = await cluster.shard(nn.Linear(33, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2)
            steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
            scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, steps], milestones=[6])
            average, head = nn.Linear(1, 1), nn.Linear(1, 1)
            nn.init.zeros_(average.weight)
            nn.init.zeros_(head.weight)
            await state.resume(model, optimizer, scheduler, average, head)
            while state.step < STEPS:
                await train_step(model, optimizer, state.step)
                scheduler.step()
                with torch.no_grad():
                    average.weight += 1
                    head.weight += 2
                event("commit", state.step)
                await state.commit(state.step + 1)
            found.append((average.weight.item(), head.weight.item(), optimizer.param_groups[0]["lr"]))

        return train

    async with crew() as members:
        lives_ = [members.hire(trainer_of(event), least=2, most=3) for event in (lives, lives, dies("commit", 3))]
        await members.wait()
    assert [life.error for life in lives_[:2]] == [None, None]
    for average, head, rate in found:
        assert (average, head) == (STEPS, 2 * STEPS)
        assert rate == pytest.approx(0.001)
    assert len(found) == 2


async def test_who_comes_when_all_is_done_has_nothing_to_do() -> None:
    """A spare that had no turn ends when the members do, and does not begin anew."""
    seen, comes = asyncio.Event(), asyncio.Event()

    async def wait_for_it(step: int) -> None:
        seen.set()
        await comes.wait()

    async with crew() as members:
        lives_ = [members.hire(trainer(before=wait_for_it), least=2, most=2) for _ in range(2)]
        await seen.wait()
        spare = members.hire(trainer(), least=2, most=2)
        while await _joined(members.address) != 3:
            continue
        comes.set()
        await members.wait()
    check(lives_)
    assert (spare.error, spare.result, spare.epochs) == (None, None, [])


async def test_schedulers_values_and_buffers_go_through_it() -> None:
    seen: dict[int, list[tuple[object, ...]]] = {}

    def trainer_of(event: Event) -> Train:
        async def train(cluster: Cluster, state: State, life: Life) -> None:
            norm = nn.BatchNorm1d(9)
            model = await cluster.shard(nn.Sequential(nn.Linear(33, 9), norm, nn.Linear(9, 1)), units=(nn.Linear,))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.1)
            await state.resume(model, optimizer, scheduler, position=0, names=("a", {"b": 1}))
            while state.step < STEPS:
                await train_step(model, optimizer, state.step)
                scheduler.step()
                event("commit", state.step)
                await state.commit(state.step + 1, position=state["position"] + 10)
                now = (optimizer.param_groups[0]["lr"], state["position"], state["names"], int(norm.num_batches_tracked or 0))
                seen.setdefault(state.step, []).append(now)

        return train

    async with crew() as members:
        for event in (lives, lives, dies("commit", 3)):
            members.hire(trainer_of(event), least=2, most=3)
        await members.wait()
    assert sorted(seen) == list(range(1, STEPS + 1))
    for step, found in seen.items():
        rate = 0.1 * 0.1 ** ((step >= 2) + (step >= 5))
        assert {entry[1:2] for entry in found} == {(10 * step,)}
        assert all(entry[0] == pytest.approx(rate) for entry in found)
        assert all(entry[2:] == (("a", {"b": 1}), step) for entry in found)


async def test_random_numbers_go_on_where_they_were() -> None:
    """One worker that is joined by another: the numbers it draws in each step are those that it would have drawn alone."""
    drawn: dict[int, float] = {}
    came = asyncio.Event()

    async def train(cluster: Cluster, state: State, life: Life) -> None:
        torch.manual_seed(1)
        model = await cluster.shard(nn.Linear(2, 1))
        await state.resume(model)
        life.epochs.append((cluster.topology.epoch, cluster.rank, cluster.world_size, state.step))
        while state.step < 6:
            if cluster.world_size == 1 and state.step == 3:
                came.set()
                while cluster.joiners == 0:  # noqa: ASYNC110 - the program that asks has nothing else to wait for
                    await asyncio.sleep(0.01)
            if life is first:
                drawn[state.step] = float(torch.rand(()))
            await state.commit(state.step + 1)

    async with crew() as members:
        first = members.hire(train, least=1, most=2)
        await came.wait()
        second = members.hire(train, least=1, most=2)
        await members.wait()
    assert [step for *_, step in first.epochs] == [0, 4]
    assert second.error is None
    torch.manual_seed(1)
    nn.Linear(2, 1)
    assert list(drawn.values()) == [float(torch.rand(())) for _ in range(6)]


async def test_every_sample_is_seen_once_whatever_the_world_size() -> None:
    seen: dict[int, list[int]] = {}

    def trainer_of(event: Event) -> Train:
        async def train(cluster: Cluster, state: State, life: Life) -> None:
            model = await cluster.shard(nn.Linear(2, 1))
            sampler = ShardedSampler(101, batch=3, rank=cluster.rank, world_size=cluster.world_size, seed=5)
            await state.resume(model, position=0)
            while state["position"] < 202:
                share = sampler.at(state["position"])
                event("begin", state.step)
                every = await cluster.backend.all_gather(torch.tensor([*share.indices[: share.samples], *[-1] * (3 - share.samples)]))
                seen[state["position"]] = [index for index in every.tolist() if index >= 0]
                await state.commit(state.step + 1, position=state["position"] + share.batch)

        return train

    async with crew() as members:
        for event in (lives, lives, dies("begin", 4)):
            members.hire(trainer_of(event), least=2, most=3)
        await members.wait()
    order = [index for position in sorted(seen) for index in seen[position]]
    assert sorted(order[:101]) == sorted(order[101:]) == list(range(101))


# --- what is refused


async def test_what_cannot_be_kept_is_refused_in_words() -> None:
    async def refused(cluster: Cluster, state: State, life: Life) -> None:
        with pytest.raises(StateError, match=r"call State.resume\(model, optimizer"):
            await state.commit(1)
        with pytest.raises(UsageError, match="a object has no state_dict"):
            await state.resume(object())
        linear = nn.Linear(2, 1)
        with pytest.raises(UsageError, match="a SGD has parameters of no sharded model that was given"):
            await state.resume(torch.optim.SGD(linear.parameters(), lr=0.1))
        model: AsyncFSDP = await cluster.shard(linear)
        await state.resume(model)
        with pytest.raises(UsageError, match="a object cannot be kept or sent"):
            await state.commit(1, strange=object())
        del state.values["strange"]
        for step, words in ((0, "step 0 is committed after step 0"), ("1", "must be a whole number, got '1'"), (1.5, "got 1.5")):
            with pytest.raises(UsageError, match=words):
                await state.commit(step)  # type: ignore[arg-type]
        await state.commit(np.int64(1))  # type: ignore[arg-type]
        assert type(state.step) is int

    async with crew() as members:
        life = members.hire(refused, least=1, most=1)
        await members.wait()
    assert life.error is None


async def test_ranks_that_commit_different_steps_are_told() -> None:
    async def train(cluster: Cluster, state: State, life: Life) -> None:
        await state.resume(await cluster.shard(nn.Linear(2, 1)))
        await state.commit(1 + cluster.rank)

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=2) for _ in range(2)]
        await members.wait()
    for life in lives_:
        assert isinstance(life.error, CollectiveMismatch)
        assert "commit of step 1" in str(life.error)
        assert "commit of step 2" in str(life.error)


async def test_other_models_than_before_are_refused() -> None:
    async def train(cluster: Cluster, state: State, life: Life) -> None:
        model = await cluster.shard(nn.Linear(9, 2 if cluster.world_size == 3 else 3))
        await state.resume(model)
        if life is unlucky:
            raise Died
        await _pass(cluster.backend)

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=3) for _ in range(3)]
        unlucky = lives_[-1]
        await members.wait()
    for life in lives_[:-1]:
        assert isinstance(life.error, StateError | UsageError | StateLost)


async def _pass(backend: Backend) -> None:
    for _ in range(100):
        await backend.barrier()
