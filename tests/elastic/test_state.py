"""State that survives an epoch's end with the training, and state that is refused."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch
from torch import nn

from shardnet import AsyncFSDP, Cluster, unbroken
from shardnet.backend.base import Backend
from shardnet.elastic import State
from shardnet.errors import ClosedError, CollectiveMismatch, StateError, StateLost, UsageError
from shardnet.training.sampler import ShardedSampler
from shardnet.zero import ZeroOptimizer
from tests.elastic.crew import Died, Life, Train, batch, crew, loss_of, net, train_step
from tests.elastic.trainer import STEPS, Event, check, dies, lives

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
    """Averages of parameters, parameters without an optimizer, and states of other types than dicts."""
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
    """A worker is joined by another: in each step it draws the same numbers that it would have drawn alone."""
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
        with pytest.raises(UsageError, match="SGD has parameters that are in none of the sharded models given here"):
            await state.resume(torch.optim.SGD(linear.parameters(), lr=0.1))
        model: AsyncFSDP = await cluster.shard(linear)
        with pytest.raises(UsageError, match="a value cannot be named 'step'"):  # otherwise the first checkpoint would fail
            await state.resume(model, step=0)
        await state.resume(model)
        with pytest.raises(UsageError, match="a value of type object cannot be kept or sent"):
            await state.commit(1, strange=object())
        assert state.values == {}
        for step, words in ((0, "must come after step 0, got 0"), ("1", "must be a whole number, got '1'"), (1.5, "got 1.5")):
            with pytest.raises(UsageError, match=words):
                await state.commit(step)  # type: ignore[arg-type]
        await state.commit(np.int64(1))
        assert type(state.step) is int

    async with crew() as members:
        life = members.hire(refused, least=1, most=1)
        await members.wait()
    assert life.error is None


async def test_ranks_that_commit_different_steps_are_told() -> None:
    async def train(cluster: Cluster, state: State, life: Life) -> None:
        await state.resume(await cluster.shard(nn.Linear(2, 1)), position=0)
        try:
            await state.commit(1 + cluster.rank, position=10)
        finally:
            life.result = (state.step, state["position"])

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=2) for _ in range(2)]
        await members.wait()
    for life in lives_:
        assert isinstance(life.error, CollectiveMismatch)
        assert "commit of step 1" in str(life.error)
        assert "commit of step 2" in str(life.error)
        assert life.result == (0, 0)


async def test_a_commit_that_is_cancelled_on_one_rank_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the commit is: the other rank has done nothing wrong, and neither rank loses the epoch."""
    monkeypatch.setattr(unbroken, "GRACE_S", 20.0)  # this does not test how fast a busy machine is

    async def train(cluster: Cluster, state: State, life: Life) -> dict[str, torch.Tensor]:
        model = await cluster.shard(net(), units=(nn.Sequential,))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        await state.resume(model, optimizer)
        life.epochs.append((cluster.topology.epoch, cluster.rank, cluster.world_size, state.step))
        while state.step < STEPS:
            await train_step(model, optimizer, state.step)
            done = state.step + 1
            committing = asyncio.create_task(state.commit(done))
            if cluster.rank == 1:
                for _ in range(3 * done):
                    await asyncio.sleep(0)
                committing.cancel()
            await asyncio.wait([committing])
            assert state.step == done
        return await model.full_state_dict()

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=2) for _ in range(2)]
        await members.wait()
    check(lives_)
    assert [len(life.epochs) for life in lives_] == [1, 1]


async def test_a_commit_that_is_cancelled_where_another_rank_does_not_come_ends_the_epoch() -> None:
    """It ends for the cancelled rank; for the other one that rank is lost, and it goes on."""
    given_up = asyncio.Event()

    async def train(cluster: Cluster, state: State, life: Life) -> int:
        model = await cluster.shard(nn.Linear(2, 1))
        await state.resume(model)
        if cluster.world_size == 2 and cluster.rank == 0:
            committing = asyncio.create_task(state.commit(1))
            while committing not in asyncio.all_tasks() or cluster.telemetry.flights.last(1)[0].label != "commit of step 1":  # noqa: ASYNC110 - nobody says so
                await asyncio.sleep(0)
            committing.cancel()
            await asyncio.wait([committing])
            given_up.set()
            assert committing.cancelled()
            await cluster.backend.barrier()
        await given_up.wait()
        await state.commit(1)
        return cluster.world_size

    async with crew() as members:
        lives_ = [members.hire(train, least=1, most=2) for _ in range(2)]
        await members.wait()
    left, stayed = sorted(lives_, key=lambda life: life.error is None)
    assert isinstance(left.error, ClosedError)
    assert (stayed.error, stayed.result) == (None, 1)


async def test_other_models_than_before_are_refused() -> None:
    async def begin(cluster: Cluster, state: State) -> None:
        await state.resume(await cluster.shard(nn.Linear(9, 2 if cluster.world_size == 3 else 3)))

    assert all(isinstance(error, StateError | UsageError | StateLost) for error in await _errors_after_a_loss(begin))


async def _pass(backend: Backend) -> None:
    for _ in range(100):
        await backend.barrier()


async def _errors_after_a_loss(begin: Callable[[Cluster, State], Awaitable[None]]) -> list[Exception | None]:
    """What two workers raise that go on after a third one has died; all of them do `begin` in each epoch."""

    async def train(cluster: Cluster, state: State, life: Life) -> None:
        await begin(cluster, state)
        if life is unlucky:
            raise Died
        await _pass(cluster.backend)

    async with crew() as members:
        *others, unlucky = [members.hire(train, least=2, most=3) for _ in range(3)]
        await members.wait()
    return [life.error for life in others]


@pytest.mark.parametrize(("numel", "scales", "slice_numel"), [(3, 2, 1), (5, 3, 2)], ids=["join", "cut"])
async def test_state_that_one_rank_alone_cannot_cut_or_join_is_refused_on_all(numel: int, scales: int, slice_numel: int) -> None:
    """Of three elements over two ranks the first rank gets two, each with a state that belongs to it alone, and the second one gets one. Of
    five in slices of two, two and one, the one in the middle must be cut."""

    async def begin(cluster: Cluster, state: State) -> None:
        model = await cluster.shard(nn.Linear(1, numel, bias=False))
        optimizer = torch.optim.SGD(model.parameters())
        await state.resume(model, optimizer)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"scales": torch.ones(scales)}
        await state.commit(1)

    for error in await _errors_after_a_loss(begin):
        assert isinstance(error, UsageError)
        assert f"the optimizer's scales of 0/weight has {scales} elements for a slice of {slice_numel}" in str(error)


async def test_state_that_does_not_fit_on_one_rank_alone_is_refused_on_all() -> None:
    """The others would take that rank for lost."""

    async def begin(cluster: Cluster, state: State) -> None:
        is_odd = cluster.topology.epoch == 2 and cluster.rank == 1
        model = await cluster.shard(nn.Linear(2, 2))
        await state.resume(model, nn.Linear(2, 3 if is_odd else 2))

    for error in await _errors_after_a_loss(begin):
        assert isinstance(error, UsageError)
        assert "weight had shape [2, 2] before, which does not fit the model now; build the same model as before" in str(error)
