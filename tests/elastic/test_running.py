"""Training goes on when members die and when others come, with the same state, the same steps and the same result."""

import asyncio
import gc
import re
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from shardnet import Cluster, ShardingStrategy
from shardnet.elastic import State, running
from shardnet.errors import CollectiveError, CollectiveMismatch, CollectiveTimeout, JoinTimeout, PeerLost, StateLost, UsageError
from tests.elastic.crew import WIDTH, Died, Life, Train, crew
from tests.elastic.trainer import Event, check, dies, joined, lives, trainer, until_joined


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


async def test_replicas_of_one_that_misses_the_lost_one_go_on_too() -> None:
    """Rank 0 dies, so that a reduction within its node fails on rank 1. Ranks 3 and 5, which average with rank 1, have lost nobody."""
    told: list[int] = []  # ranks whose backward has failed

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        event = dies("backward", 4) if (cluster.topology.epoch, cluster.rank) == (1, 0) else lives
        hybrid: dict[str, Any] = {"strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2} if cluster.world_size == 6 else {}
        try:
            return await trainer(event, **hybrid)(cluster, state, life)
        except CollectiveError:
            told.append(cluster.rank)
            while cluster.rank == 1 and not {3, 5} <= set(told):  # noqa: ASYNC110 - it goes only when the others do not depend on that
                await asyncio.sleep(0)
            raise

    async with crew() as members:
        all_of_them = [members.hire(train, least=5, most=6) for _ in range(6)]
        await members.wait()
    survivors = [life for life in all_of_them if not isinstance(life.error, Died)]
    assert [[(world, step) for _, _, world, step in life.epochs] for life in survivors] == [[(6, 0), (5, 4)]] * 5
    check(survivors)


async def test_losses_one_after_the_other_down_to_one_worker() -> None:
    async with crew() as members:
        events = [lives, dies("backward", 2), dies("commit", 4), dies("begin", 6)]
        lives_ = [members.hire(trainer(event), least=1, most=4) for event in events]
        await members.wait()
    check(lives_[:1])
    assert [(world, step) for _, _, world, step in lives_[0].epochs] == [(4, 0), (3, 2), (2, 4), (1, 6)]


async def test_a_loss_while_the_state_is_being_resumed() -> None:
    """One dies in a step, and another before it has resumed in the next epoch: the remaining state of the first epoch must serve again."""

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
        while await joined(members.address) != 2:
            continue
        comes.set()
        await members.wait()
    check([*first, later])
    assert [(world, step) for _, _, world, step in first[0].epochs] == [(1, 0), (2, 4)]
    assert [(world, step) for _, _, world, step in later.epochs] == [(2, 4)]


async def test_a_newcomer_at_rank_0_leaves_nobody_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A replacement has rank 0, the place of the lost one. A member that was there must say what has happened."""
    seen, comes = asyncio.Event(), asyncio.Event()

    async def wait_for_it(step: int) -> None:
        if step == 3:
            seen.set()
            await comes.wait()

    async with crew() as members:
        first = members.hire(trainer(before=wait_for_it), least=1, most=2, local_rank=1)
        await seen.wait()
        later = members.hire(trainer(), least=1, most=2, local_rank=0)
        while await joined(members.address) != 2:
            continue
        comes.set()
        await members.wait()
    check([first, later])
    assert [(rank, step) for _, rank, _, step in later.epochs] == [(0, 4)]
    told = [record.getMessage() for record in caplog.records if "it goes on behind step" in record.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("epoch 2 with 2 workers: it goes on behind step 4, "), told


async def test_a_spare_takes_the_place_of_a_lost_one() -> None:
    async with crew() as members:
        lives_ = [members.hire(trainer(event), least=2, most=2) for event in (lives, dies("step", 5), lives)]
        await members.wait()
    dead = [life for life in lives_ if isinstance(life.error, Died)]
    if dead:  # otherwise the one that dies was the spare, and never had a turn
        survivors = [life for life in lives_ if life.error is None]
        check(survivors)
        assert sorted(life.epochs[-1][3] for life in survivors) == [5, 5]


async def test_without_enough_workers_the_rest_gives_up_in_words() -> None:
    async with crew() as members:
        one = members.hire(trainer(), least=2, most=2, join_s=1.5)
        other = members.hire(trainer(dies("step", 1)), least=2, most=2, join_s=1.5)
        await members.wait()
    assert isinstance(other.error, Died)
    assert isinstance(one.error, JoinTimeout)
    assert "only 1 of 2 elastic workers joined" in str(one.error)
    (note,) = one.error.__notes__
    assert re.search(r"to follow epoch 1, which had ended: \[rank \d/2 epoch 1 .*\] rank \d \(127\.0\.0\.1:\d+\) lost during ", note)


@pytest.mark.parametrize(
    ("has_folder", "advice"),
    [
        (False, "start the training again; give elastic.run() a folder for checkpoints, so that next time it can go on from the last one"),
        (True, "{} has no checkpoint yet, so start the training again"),
    ],
)
async def test_more_losses_than_copies_are_said_so(has_folder: bool, advice: str, tmp_path: Path) -> None:
    """Two neighbours die at once: the first one's part is gone, since the second one had its only copy."""
    settings: dict[str, Any] = {"checkpoints": tmp_path} if has_folder else {}
    both = asyncio.Barrier(2)

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        async def together(step: int) -> None:
            if step == 3:
                await both.wait()

        if cluster.rank in (1, 2) and cluster.topology.epoch == 1:
            return await trainer(dies("begin", 3), before=together)(cluster, state, life)
        return await trainer()(cluster, state, life)

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=4, **settings) for _ in range(4)]
        await members.wait()
    lost = [life.error for life in lives_ if isinstance(life.error, StateLost)]
    assert len(lost) == 2
    assert str(lost[0]) == (
        "the state of step 3 (epoch 1) is lost: more workers are gone than there were copies of their state; " + advice.format(tmp_path)
    )


async def test_every_other_step_may_be_committed() -> None:
    async with crew() as members:
        survivors = [members.hire(trainer(), least=2, most=3, every=3) for _ in range(2)]
        members.hire(trainer(dies("begin", 5)), least=2, most=3, every=3)
        await members.wait()
    check(survivors)
    assert [step for *_, step in survivors[0].epochs] == [0, 3]


async def test_steps_may_be_counted_otherwise_than_by_one() -> None:
    """Of the steps 3, 6, 9 and 12 those are committed that pass a multiple of 4."""
    seen: list[tuple[int, int]] = []

    def trainer_of(event: Event) -> Train:
        async def train(cluster: Cluster, state: State, life: Life) -> None:
            model = await cluster.shard(nn.Linear(3, 1))
            await state.resume(model)
            seen.append((cluster.world_size, state.step))
            while state.step < 12:
                event("begin", state.step)
                await cluster.backend.barrier()  # a member that begins this step knows that all others have committed the one before
                await state.commit(state.step + 3)

        return train

    for at, behind in ((3, 0), (6, 6), (9, 9)):
        seen.clear()
        async with crew() as members:
            for event in (lives, lives, dies("begin", at)):
                members.hire(trainer_of(event), least=2, most=3, every=4)
            await members.wait()
        assert seen == [(3, 0)] * 3 + [(2, behind)] * 2


async def test_an_error_of_the_training_itself_is_not_taken_for_a_loss() -> None:
    async def fails(cluster: Cluster, state: State, life: Life) -> None:
        raise ValueError("a mistake")

    async with crew() as members:
        lives_ = [members.hire(fails, least=2, most=2) for _ in range(2)]
        await members.wait()
    assert [str(life.error) for life in lives_] == ["a mistake", "a mistake"]


async def test_who_comes_when_all_is_done_has_nothing_to_do() -> None:
    """A spare that had no turn ends when the members do, and does not start the training again."""
    seen, comes = asyncio.Event(), asyncio.Event()

    async def wait_for_it(step: int) -> None:
        seen.set()
        await comes.wait()

    async with crew() as members:
        lives_ = [members.hire(trainer(before=wait_for_it), least=2, most=2) for _ in range(2)]
        await seen.wait()
        spare = members.hire(trainer(), least=2, most=2)
        while await joined(members.address) != 3:
            continue
        comes.set()
        await members.wait()
    check(lives_)
    assert (spare.error, spare.result, spare.epochs) == (None, None, [])


async def test_a_step_that_all_have_written_counts_though_nobody_was_told_and_outlives_the_next_loss() -> None:
    """One dies when all have written the step and none is through the barrier, and another one before it has committed that step again. The
    others must not overwrite what they have of the step."""

    async def die(*_: object, **__: object) -> Any:
        raise Died

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        former = life.epochs[0][1] if life.epochs else cluster.rank
        event: Event = lives
        if cluster.topology.epoch == 2 and former == 2:
            state._commit = die  # type: ignore[method-assign]  # what comes behind the loading in resume()
        elif former == 0:

            def before_the_barrier(place: str, step: int) -> None:
                if (place, step) == ("commit", 3):
                    assert state._copying is not None
                    state._copying._backend.barrier = die  # type: ignore[assignment, method-assign]  # it has sent all by then

            event = before_the_barrier
        return await trainer(event)(cluster, state, life)

    async with crew() as members:
        lives_ = [members.hire(train, least=2, most=4) for _ in range(4)]
        await members.wait()
    survivors = [life for life in lives_ if life.error is None]
    check(survivors)
    assert [[step for *_, step in life.epochs] for life in survivors] == [[0, 4]] * 2


async def test_a_worker_that_is_stuck_is_left_behind_and_comes_back() -> None:
    woken, stuck = asyncio.Event(), 0

    async def hang(step: int) -> None:
        nonlocal stuck
        if step == 3 and not stuck:
            stuck += 1
            await woken.wait()

    async def wake(step: int) -> None:
        if step == 5:
            woken.set()
            await until_joined(members.address, 3)

    async with crew() as members:
        befores = [wake, None, hang]
        lives_ = [members.hire(trainer(before=before), least=2, most=3, collective_s=1.5) for before in befores]
        await members.wait()
    check(lives_)
    assert stuck == 1
    assert [(epoch, world, step) for epoch, _, world, step in lives_[0].epochs] == [(1, 3, 0), (2, 2, 3), (3, 3, 6)]
    assert [(epoch, world, step) for epoch, _, world, step in lives_[2].epochs] == [(1, 3, 0), (3, 3, 6)]


async def test_who_is_missing_at_the_same_step_again_ends_the_training() -> None:
    """For example because the program is wrong: it would fail in every epoch."""

    async def dawdle(step: int) -> None:
        if step == 3:
            await asyncio.sleep(2.2)  # the fault's own length: too long for the collective, but too short for being given up

    async with crew() as members:
        lives_ = [members.hire(trainer(before=before), least=2, most=2, collective_s=1.5) for before in (None, dawdle)]
        await members.wait()
    assert [type(life.error) for life in lives_] == [CollectiveTimeout, CollectiveTimeout]
    assert [(epoch, step) for epoch, _, _, step in lives_[0].epochs] == [(1, 0), (2, 3)]


async def test_an_error_of_another_rank_inside_a_collective_costs_the_epoch() -> None:
    """A rank that has the error itself leaves; here none does, so all come back."""
    failed: set[int] = set()
    all_of_them = asyncio.Barrier(3)  # if one left while another is still behind, that one would see a loss before its own error

    def fail_once(number: int) -> Callable[[int], Awaitable[None]]:
        async def fail(step: int) -> None:
            if step == 3 and number not in failed:
                failed.add(number)
                await all_of_them.wait()
                raise CollectiveError("all_gather #7: rank 9 has no memory left")

        return fail

    async with crew() as members:
        lives_ = [members.hire(trainer(before=fail_once(number)), least=3, most=3) for number in range(3)]
        await members.wait()
    check(lives_)
    assert all([(epoch, step) for epoch, _, _, step in life.epochs] == [(1, 0), (2, 3)] for life in lives_)


async def test_newcomers_with_another_program_end_and_the_others_go_on() -> None:
    def other() -> nn.Module:
        return nn.Sequential(nn.Sequential(nn.Linear(7, 7)), nn.Linear(7, 1))

    async def until_they_came(step: int) -> None:
        if step == 3:
            members.hire(trainer(make=other), least=2, most=4)
            members.hire(trainer(make=other), least=2, most=4)
            await until_joined(members.address, 4)

    async with crew() as members:
        lives_ = [members.hire(trainer(before=before), least=2, most=4) for before in (until_they_came, None)]
        await members.wait()
    check(lives_)
    assert {type(life.error) for life in members.lives[2:]} <= {CollectiveMismatch, PeerLost, UsageError}
    assert all(life.error is not None for life in members.lives[2:])


@pytest.mark.parametrize(("times", "error"), [(2, type(None)), (3, CollectiveMismatch)])
async def test_newcomers_may_come_to_know_of_it_one_after_the_other(times: int, error: type) -> None:
    """A newcomer that hears first of the loss of another one joins again: the others allow that, but not for ever."""

    def stubborn() -> Callable[[Cluster, State, Life], Awaitable[Any]]:
        left, failed = times, False

        async def fail_once(step: int) -> None:
            nonlocal failed
            if step == 3 and not failed:
                failed = True
                await both.wait()
                raise CollectiveError("all_gather #7: rank 9 has no memory left")

        inner = trainer(before=fail_once)

        async def train(cluster: Cluster, state: State, life: Life) -> Any:
            nonlocal left
            if state.has_copies and left:
                left -= 1
                await both.wait()
                raise CollectiveMismatch("newcomers shard another model")
            return await inner(cluster, state, life)

        return train

    both = asyncio.Barrier(2)  # if one left while the other is still behind, that one would see a loss
    async with crew() as members:
        lives_ = [members.hire(stubborn(), least=2, most=2) for _ in range(2)]
        await members.wait()
    assert [type(life.error) for life in lives_] == [error, error]


@pytest.mark.parametrize("place", ["begin", "backward", "committed"])
async def test_the_model_of_the_epoch_before_is_gone_when_the_next_one_is_made(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is gone after two runs of Python's collector, however many layers it has; otherwise two models would be in memory."""
    monkeypatch.setattr(running, "COLLECTIONS", 2)

    def remembering(made: "list[weakref.ref[nn.Module]]", there: list[int]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            there.append(sum(each() is not None for each in made))
            module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)), nn.Linear(WIDTH, 1))
            made.append(weakref.ref(module))
            return module

        return make

    there: list[list[int]] = [[], []]
    async with crew() as members:
        survivors = [members.hire(trainer(make=remembering([], each)), least=2, most=3) for each in there]
        members.hire(trainer(dies(place, 4), make=remembering([], [])), least=2, most=3)
        await members.wait()
    assert [life.error for life in survivors] == [None, None]
    assert there == [[0, 0], [0, 0]]


def test_models_are_collected_though_another_thread_collects_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, go = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            under_way.set()
            go.wait(10)

    def collect_slowly() -> None:
        slow: list[object] = [Slow()]
        slow.append(slow)
        del slow
        gc.collect()

    def wait(_: float) -> None:
        go.set()
        other.join(10)

    other = threading.Thread(target=collect_slowly)
    other.start()
    assert under_way.wait(10)
    model = nn.Linear(1, 1)
    model.myself = model
    gone = weakref.ref(model)
    del model
    monkeypatch.setattr(running, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    try:
        running._collect_models()
    finally:
        wait(0)
    assert gone() is None
