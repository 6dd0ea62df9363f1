"""Workers that are told to leave: they leave only when their state is safe, and the others lose nothing."""

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from shardnet import Cluster, ShardingStrategy
from shardnet.checkpoint.folder import Folder
from shardnet.elastic import State
from shardnet.elastic.copying import Copying, Waiting
from shardnet.elastic.generation import Generation, Mark
from shardnet.elastic.saves import Saves
from shardnet.errors import PeerLost
from shardnet.training.departure import Departure
from tests.cli.launched import Launched
from tests.elastic.crew import Died, Life, crew
from tests.elastic.trainer import LEFT, STEPS, TOLD, check, told, trainer, until_joined


@pytest.mark.parametrize("every", [1, 3])
async def test_who_leaves_costs_the_others_no_step(every: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardnet.rendezvous.service")
    async with crew() as members:
        lives = [members.hire(told(1), least=2, most=3, every=every) for _ in range(3)]
        await members.wait()
    assert [life.left for life in sorted(lives, key=lambda life: life.epochs[0][1])] == [False, True, False]
    stayed = [life for life in lives if not life.left]
    assert [[(world, step) for _, _, world, step in life.epochs] for life in stayed] == [[(3, 0), (2, LEFT)]] * 2
    check(stayed)
    assert f"rank 1 leaves, as it was told, after step {LEFT}" in caplog.text
    assert f"was told to leave; step {LEFT} is committed" in caplog.text
    assert caplog.text.count(" is gone: it was told to leave\n") == 1


async def test_nobody_waits_for_the_goodbye_of_who_leaves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Its machine may be gone before the goodbye, or it cannot reach the rendezvous, which then waits for its lease."""
    caplog.set_level(logging.INFO, "shardnet.rendezvous.service")
    withdraw = Cluster.withdraw
    others_go_on = asyncio.Event()

    async def late(self: Cluster) -> None:
        await others_go_on.wait()
        await withdraw(self)

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        if cluster.topology.epoch == 2:
            others_go_on.set()
        return await told(1)(cluster, state, life)

    monkeypatch.setattr(Cluster, "withdraw", late)
    async with crew() as members:
        lives = [members.hire(train, least=2, most=3) for _ in range(3)]
        await members.wait()
    assert [life.left for life in sorted(lives, key=lambda life: life.epochs[0][1])] == [False, True, False]
    stayed = [life for life in lives if not life.left]
    assert [[(world, step) for _, _, world, step in life.epochs] for life in stayed] == [[(3, 0), (2, LEFT)]] * 2
    check(stayed)
    assert caplog.text.count(" is gone: the others go on without it\n") == 1


HYBRID = {"strategy": ShardingStrategy.HYBRID_SHARD, "intra_node_size": 2}  # ranks 0 and 2 of 4 have the same half, 1 and 3 the other


@pytest.mark.parametrize("strategy", [{}, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("leaving", [(1, 2), (0, 2), (0, 1, 2)])
async def test_any_workers_leave_together(leaving: tuple[int, ...], strategy: dict[str, Any]) -> None:
    """Also one with the one that keeps its copy, and all that hold the same."""
    async with crew() as members:
        lives = [members.hire(told(*leaving, **strategy), least=1, most=4) for _ in range(4)]
        await members.wait()
    assert [life.left for life in sorted(lives, key=lambda life: life.epochs[0][1])] == [rank in leaving for rank in range(4)]
    stayed = [life for life in lives if not life.left]
    assert [[(world, step) for _, _, world, step in life.epochs] for life in stayed] == [[(4, 0), (len(stayed), LEFT)]] * len(stayed)
    check(stayed)


@pytest.mark.parametrize("strategy", [{}, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("dies", [0, 2, 3])
async def test_what_a_worker_held_that_has_left_is_not_lost_with_another_one(
    dies: int, strategy: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 leaves. Then one of the others is lost before the next epoch has its state: the one that kept the copy of what rank 1 held
    (2, or with HYBRID_SHARD 3), or the one whose copy rank 1 kept (0)."""

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        if cluster.topology.epoch == 2 and life.epochs[0][1] == dies:
            raise Died
        return await told(1, **strategy)(cluster, state, life)

    commit = State._commit

    async def observed(self: State, mark: Mark) -> Waiting:
        waiting = await commit(self, mark)
        further.append(sum(len(each.taken_over) for each in self._generations()))
        return waiting

    further: list[int] = []  # copies, after each commit
    monkeypatch.setattr(State, "_commit", observed)
    async with crew() as members:
        lives = [members.hire(train, least=1, most=4) for _ in range(4)]
        await members.wait()
    assert [life.left for life in sorted(lives, key=lambda life: life.epochs[0][1])] == [rank == 1 for rank in range(4)]
    stayed = [life for life in lives if not (life.left or isinstance(life.error, Died))]
    assert [[(world, step) for _, _, world, step in life.epochs] for life in stayed] == [[(4, 0), (2, LEFT)]] * 2
    check(stayed)
    assert not any(further), "copies of another epoch take memory"


async def test_who_is_to_leave_stays_if_another_one_is_lost_before_all_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    hand_over = Copying.hand_over

    async def fails(self: Copying, generation: Generation, leaving: list[int]) -> None:
        if generation.mark == (1, LEFT) and self._backend.rank == 2:
            raise Died
        await hand_over(self, generation, leaving)

    monkeypatch.setattr(Copying, "hand_over", fails)
    async with crew() as members:
        lives = [members.hire(told(1), least=1, most=3) for _ in range(3)]
        await members.wait()
    check_that_one_stayed_until_it_could_leave(lives, LEFT)


async def test_who_is_to_leave_stays_until_the_loss_of_another_is_made_good() -> None:
    """It has the only copy of the lost worker's part."""
    async with crew() as members:
        lives = [members.hire(told(1, dies=2), least=1, most=3) for _ in range(3)]
        await members.wait()
    stayed, left, died = sorted(lives, key=lambda life: (isinstance(life.error, Died), life.left))
    assert isinstance(died.error, Died)
    assert left.left
    assert [world for _, _, world, _ in left.epochs] == [3, 2]
    assert [world for _, _, world, _ in stayed.epochs] == [3, 2, 1]
    assert stayed.epochs[2][3] == stayed.epochs[1][3] + 2
    check([stayed])


def check_that_one_stayed_until_it_could_leave(lives: list[Life], step: int = TOLD) -> None:
    """Of three, one died behind this step, one was told to leave but went on into the next epoch, and one was left alone two steps later,
    when that left."""
    stayed, left, died = sorted(lives, key=lambda life: (isinstance(life.error, Died), life.left))
    assert isinstance(died.error, Died)
    assert left.left
    assert [(world, begun) for _, _, world, begun in left.epochs] == [(3, 0), (2, step)]
    assert [(world, begun) for _, _, world, begun in stayed.epochs] == [(3, 0), (2, step), (1, step + 2)]
    check([stayed])


async def test_who_is_told_at_the_beginning_of_an_epoch_stays_until_a_loss_before_it_is_made_good() -> None:
    """As above, but the order comes when the loss is known and the state is not there yet, which takes long for a large model."""

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        def event(place: str, step: int) -> None:
            if (place, step, cluster.rank, cluster.topology.epoch) == ("begin", TOLD, 2, 1):
                raise Died

        if cluster.topology.epoch == 2 and cluster.rank == 1:
            assert life.departure.ask()
        return await trainer(event)(cluster, state, life)

    async with crew() as members:
        lives = [members.hire(train, least=1, most=3) for _ in range(3)]
        await members.wait()
    check_that_one_stayed_until_it_could_leave(lives)


async def test_who_is_told_between_two_epochs_stays_until_the_loss_is_made_good() -> None:
    """As above, but the order comes even earlier, while the workers that are left wait for each other."""
    asked: list[bool] = []

    async def ask(state: State, life: Life) -> None:
        while state.can_part:  # noqa: ASYNC110 - until the epoch is over
            await asyncio.sleep(0)
        asked.append(life.departure.ask())

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        def event(place: str, step: int) -> None:
            if (place, step, cluster.rank, cluster.topology.epoch) == ("begin", TOLD, 2, 1):
                raise Died

        try:
            return await trainer(event)(cluster, state, life)
        except PeerLost:
            if (cluster.topology.epoch, cluster.rank) == (1, 1):
                asking.append(asyncio.create_task(ask(state, life)))
            raise

    asking: list[asyncio.Task[None]] = []
    async with crew() as members:
        lives = [members.hire(train, least=1, most=3) for _ in range(3)]
        await members.wait()
    await asyncio.gather(*asking)
    assert asked == [True]
    check_that_one_stayed_until_it_could_leave(lives)


async def test_who_is_told_as_another_one_leaves_stays_until_the_next_epoch_is_safe(told_late: Callable[[int, int], list[bool]]) -> None:
    """It has not asked in time to leave with that one."""
    asked = told_late(2, 2)
    async with crew() as members:
        lives = [members.hire(told(1), least=1, most=3) for _ in range(3)]
        await members.wait()
    assert asked == [True]
    assert [life.left for life in sorted(lives, key=lambda life: life.epochs[0][1])] == [False, True, True]
    (stayed,) = [life for life in lives if not life.left]
    assert [(world, step) for _, _, world, step in stayed.epochs] == [(3, 0), (2, LEFT), (1, LEFT + 2)]
    check([stayed])


@pytest.mark.parametrize(("count", "most"), [(1, 2), (2, 3), (2, 2)], ids=["one", "two", "full"])
async def test_where_all_are_to_leave_one_stays_for_who_waits_to_join(count: int, most: int) -> None:
    """Otherwise it would begin the training again. Also for one that waits for a place in a full job."""
    newcomer: list[Life] = []

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        async def before(step: int) -> None:
            if (cluster.topology.epoch, step) == (1, TOLD):
                assert life.departure.ask()
            if (cluster.topology.epoch, step) == (1, TOLD + 1):
                if cluster.rank == 0:
                    newcomer.append(members.hire(trainer(), least=1, most=most))
                while not (cluster.joiners or cluster.spares):  # noqa: ASYNC110 - nobody else is told
                    await asyncio.sleep(0)

        return await trainer(before=before)(cluster, state, life)

    async with crew() as members:
        lives = [members.hire(train, least=1, most=most) for _ in range(count)]
        await members.wait()
        await members.wait()  # for the newcomer, too
    assert [life.left for life in lives] == [True] * count
    assert sorted(len(life.epochs) for life in lives) == [1] * (count - 1) + [2]
    assert [(world, step) for _, _, world, step in newcomer[0].epochs] == [(2, LEFT), (1, LEFT + 2)]
    check(newcomer)


async def test_a_newcomer_that_is_told_before_its_first_step_stays_until_a_loss_is_made_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the place of rank 2, which died. Rank 0, which keeps the copy of what it got, dies before the first step of that epoch."""
    make_good = Saves.make_good
    newcomer: list[Life] = []
    asked: list[bool] = []

    async def late(self: Saves, step: int, values: Mapping[str, Any]) -> None:
        await make_good(self, step, values)
        if Departure.current() is newcomer[0].departure and not asked:
            asked.append(newcomer[0].departure.ask())

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        async def before(step: int) -> None:
            if cluster.topology.epoch == 1 and step == TOLD:
                await until_joined(members.address, 4)
                if cluster.rank == 2:
                    raise Died
            if cluster.topology.epoch == 2 and cluster.rank == 0:
                raise Died

        return await trainer(before=before)(cluster, state, life)

    async def first(cluster: Cluster, state: State, life: Life) -> object:
        if not newcomer:
            newcomer.append(members.hire(train, least=1, most=3))
        return await train(cluster, state, life)

    monkeypatch.setattr(Saves, "make_good", late)
    async with crew() as members:
        lives = [members.hire(first, least=1, most=3) for _ in range(3)]
        await members.wait()
        await members.wait()  # for the newcomer, too
    assert asked == [True]
    assert newcomer[0].left
    assert [(world, step) for _, _, world, step in newcomer[0].epochs] == [(3, TOLD), (2, TOLD)]
    (stayed,) = [life for life in lives if not isinstance(life.error, Died)]
    assert [(world, step) for _, _, world, step in stayed.epochs] == [(3, 0), (3, TOLD), (2, TOLD), (1, LEFT)]
    check([stayed])


async def test_who_waits_for_an_epoch_that_does_not_come_does_not_stay_for_it() -> None:
    cancelled: list[None] = []
    departure = Departure(lambda: cancelled.append(None))
    with departure.delayed(0.0, 60.0):
        assert departure.ask()
        await asyncio.sleep(0.1)  # longer than the delay
    assert (cancelled, departure.signal) == ([None], signal.SIGTERM)
    departure = Departure(lambda: cancelled.append(None))
    with departure.delayed(0.0, 60.0):
        assert departure.ask()
    await asyncio.sleep(0.1)
    assert (len(cancelled), departure.signal) == (1, None), "it came in time"
    assert departure.ask(), "once is enough"
    with departure.delayed(60.0, 0.0):
        await asyncio.sleep(0.1)  # longer than the delay after a request that came before
    assert (len(cancelled), departure.signal) == (2, signal.SIGTERM)


async def test_nobody_waits_for_a_commit_where_none_will_come() -> None:
    """Three cases: before the state is there, when the epoch is over, and in a job that keeps no copies."""
    asked: list[bool] = []

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        asked.append(life.departure.ask())
        result = await trainer(steps=1)(cluster, state, life)
        asked.append(life.departure.ask())
        return result

    async with crew() as members:
        life = members.hire(train, least=1, most=1, elastic=False)
        await members.wait()
    assert life.error is None
    assert asked == [False, False]
    assert not life.departure.ask()


@pytest.mark.parametrize("elastic", [True, False])
async def test_who_is_told_in_the_last_step_has_what_came_of_the_training(
    tmp_path: Path, elastic: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no later commit at which it could leave."""

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        def event(place: str, step: int) -> None:
            if (place, step, cluster.rank) == ("committed", STEPS, 1):
                assert life.departure.ask()

        return await trainer(event)(cluster, state, life)

    async with crew() as members:
        lives = [members.hire(train, least=2, most=2, elastic=elastic, checkpoints=tmp_path, save_every=STEPS) for _ in range(2)]
        await members.wait()
    assert [life.left for life in lives] == [False, False]
    assert [len(life.epochs) for life in lives] == [1, 1]
    check(lives)
    assert Folder(tmp_path, 2).steps() == [STEPS]
    assert caplog.text.count("the training was over before this worker could leave") == 1


PROGRAM = """
import sys
import shardnet, torch
from shardnet import elastic
from torch import nn

async def train(cluster, state):
    model = await cluster.shard(nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    await state.resume(model, optimizer)
    while True:
        await model.backward((await model(torch.ones(2, 3))).square().mean())
        await model.step(optimizer)
        optimizer.zero_grad()
        await state.commit(state.step + 1)
        if cluster.rank == 0:
            print("step", state.step, flush=True)

shardnet.run(lambda: elastic.run(train, checkpoints=sys.argv[1], save_every=1_000_000))
"""


def test_sigterm_to_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    folder = tmp_path / "checkpoints"
    with Launched(tmp_path, "run", "--nproc", "2", "train.py", str(folder)) as run:
        run.read_until("step 5\n")
        run.process.send_signal(signal.SIGTERM)
        result = run.finish()
    assert result.status == 128 + signal.SIGTERM, result
    last = int(result.out.split()[-1])
    assert Folder(folder, 2).steps() in ([last], [last + 1]), "what was saved is the last step"
    assert "SIGTERM: this worker leaves as soon as its state is safe" in result.err
    assert "Traceback" not in result.err
