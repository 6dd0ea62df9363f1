"""Workers that are told to leave, and the checkpoint of what they leave behind."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardnet import Cluster
from shardnet.checkpoint.folder import Folder
from shardnet.elastic import State
from shardnet.elastic import state as elastic_state
from shardnet.elastic.saves import Saves
from shardnet.errors import JoinTimeout, Preempted
from tests.elastic.crew import Died, Life, crew
from tests.elastic.test_checkpoints import spoil
from tests.elastic.trainer import LEFT, STEPS, TOLD, check, told, trainer

RARELY = 1000


async def test_who_is_killed_while_its_last_checkpoint_is_written_has_handed_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk may be slower than whoever has sent SIGTERM is patient. Rank 2 keeps the copy of what rank 1 held."""

    async def killed(_: float | None = None) -> None:
        raise Died

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        if cluster.topology.epoch == 1 and cluster.rank in (1, 2):
            monkeypatch.setattr(state._saves, "settle", killed)
        return await told(1, 2)(cluster, state, life)

    async with crew() as members:
        lives = [members.hire(train, least=1, most=4) for _ in range(4)]
        await members.wait()
    stayed = [life for life in lives if not isinstance(life.error, Died)]
    assert [[(world, step) for _, _, world, step in life.epochs] for life in stayed] == [[(4, 0), (2, LEFT)]] * 2
    check(stayed)


async def test_those_that_stay_do_not_wait_long_for_a_disk(
    tmp_path: Path, disk: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They write the checkpoint that was due in the next epoch."""

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        if cluster.topology.epoch == 2:
            disk.set()
        return await told(1)(cluster, state, life)

    monkeypatch.setattr(elastic_state, "LEAVE_S", 0.1)
    async with crew() as members:
        lives = [members.hire(train, least=2, most=3, checkpoints=tmp_path, save_every=LEFT) for _ in range(3)]
        await members.wait()
    assert [life.left for life in sorted(lives, key=lambda life: life.epochs[0][1])] == [False, True, False]
    stayed = [life for life in lives if not life.left]
    assert [[(world, step) for _, _, world, step in life.epochs] for life in stayed] == [[(3, 0), (2, LEFT)]] * 2
    check(stayed)
    assert caplog.text.count(f"the checkpoint of step {LEFT} is still being written: those that leave do not wait for it") == 1
    assert Folder(tmp_path, 2).steps() == [STEPS, LEFT]


async def test_those_that_leave_one_after_the_other_wait_once_for_a_disk(
    tmp_path: Path, disk: threading.Event, told_late: Callable[[int, int], list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is told while the others wait does not make them wait anew."""
    settle, waited = Saves.settle, list[float | None]()

    async def noted(self: Saves, within_s: float | None = None) -> None:
        if self.is_saving:
            waited.append(within_s)
        await settle(self, within_s)

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        if cluster.topology.epoch == 2:
            disk.set()
        return await told(1)(cluster, state, life)

    asked = told_late(2, 1)
    monkeypatch.setattr(Saves, "settle", noted)
    monkeypatch.setattr(elastic_state, "LEAVE_S", 0.3)
    async with crew() as members:
        lives = [members.hire(train, least=1, most=3, checkpoints=tmp_path, save_every=RARELY) for _ in range(3)]
        await members.wait()
    assert asked == [True]
    assert sum(life.left for life in lives) == 2
    assert sorted(waited, key=lambda within_s: within_s or 0.0)[:3] == [0.0] * 3, "the second time nothing is left"
    assert len(waited) == 6


async def test_one_that_is_being_written_is_finished_before_who_waits_is_taken_in_and_who_was_told_leaves(
    tmp_path: Path, disk: threading.Event
) -> None:
    """The only worker, so it stays until another one has the state."""
    newcomer: list[Life] = []
    saved = TOLD + 1

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        async def before(step: int) -> None:
            if (cluster.topology.epoch, step) == (1, TOLD):
                assert life.departure.ask()
            if (cluster.topology.epoch, step) == (1, saved):
                newcomer.append(members.hire(trainer(), least=1, most=2, checkpoints=tmp_path, save_every=saved))
                while not cluster.joiners:  # noqa: ASYNC110 - nobody else is told
                    await asyncio.sleep(0)
            if step == LEFT:
                disk.set()

        return await trainer(before=before)(cluster, state, life)

    async with crew() as members:
        life = members.hire(train, least=1, most=2, checkpoints=tmp_path, save_every=saved)
        await members.wait()
        await members.wait()  # for the newcomer, too
    assert life.left
    (_, _, together, begun), (_, _, alone, _) = newcomer[0].epochs
    assert (together, alone) == (2, 1)
    assert begun > LEFT
    check(newcomer)
    assert saved in Folder(tmp_path, 2).steps()


async def test_who_was_told_leaves_though_who_waits_gives_up_while_one_is_written(tmp_path: Path, disk: threading.Event) -> None:
    """As above, but nobody is left for whom it would have to stay."""
    newcomer: list[Life] = []

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        async def before(step: int) -> None:
            if step == TOLD:
                assert life.departure.ask()
            if step == TOLD + 1:
                newcomer.append(members.hire(trainer(), least=1, most=2, join_s=1.0))
                while not cluster.joiners:  # noqa: ASYNC110 - nobody else is told
                    await asyncio.sleep(0)
            if step == LEFT:
                while cluster.joiners:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                disk.set()

        return await trainer(before=before)(cluster, state, life)

    async with crew() as members:
        life = members.hire(train, least=1, most=2, checkpoints=tmp_path, save_every=TOLD + 1)
        await members.wait()
        await members.wait()  # for the newcomer, too
    assert isinstance(newcomer[0].error, JoinTimeout)
    assert life.left
    assert LEFT <= max(life.states) < STEPS


@pytest.mark.parametrize("elastic", [True, False])
async def test_all_leave_and_what_they_had_is_saved(tmp_path: Path, elastic: bool, caplog: pytest.LogCaptureFixture) -> None:
    wanted: dict[str, Any] = {"checkpoints": tmp_path, "save_every": RARELY, "elastic": elastic}
    async with crew() as members:
        first = [members.hire(told(0, 1), least=2, most=2, **wanted) for _ in range(2)]
        await members.wait()
    assert [life.left for life in first] == [True, True]
    assert Folder(tmp_path, 2).steps() == [LEFT]
    assert f"rank 1 leaves, as it was told, after step {LEFT}; step {LEFT} is saved in {tmp_path}" in caplog.text
    async with crew() as members:
        others = [members.hire(trainer(), least=3, most=3, **wanted) for _ in range(3)]
        await members.wait()
    assert {(world, step) for life in others for _, _, world, step in life.epochs} == {(3, LEFT)}
    check(others)


async def test_where_nothing_is_saved_of_what_all_leave_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def spoiling(cluster: Cluster, state: State, life: Life) -> object:
        spoil(tmp_path)
        return await told(0)(cluster, state, life)

    for train, folder in ((told(0), None), (spoiling, tmp_path)):
        async with crew() as members:
            members.hire(train, least=1, most=1, checkpoints=folder, save_every=RARELY)
            await members.wait()
    first, second = [line for line in caplog.messages if line.startswith(f"rank 0 leaves, as it was told, after step {LEFT}; ")]
    assert "; nothing of it is saved: give elastic.run() a folder for checkpoints" in first
    assert f"; the checkpoint of step {LEFT} cannot be written: rank 0: " in second
    assert f"{tmp_path} has no good one: see that the folder can be written, then start the job again, from the beginning" in second


async def test_a_job_that_is_not_elastic_ends_with_who_leaves_and_says_what_is_saved(tmp_path: Path) -> None:
    async with crew() as members:
        lives = [members.hire(told(1), least=2, most=2, elastic=False, checkpoints=tmp_path, save_every=RARELY) for _ in range(2)]
        await members.wait()
    stayed, left = sorted(lives, key=lambda life: life.left)
    assert left.left
    assert isinstance(stayed.error, Preempted)
    assert "rank 1 (127.0.0.1:" in str(stayed.error)
    assert f"was told to leave, and this job is not elastic; step {LEFT} is saved in {tmp_path}; start the job again" in str(stayed.error)
    assert Folder(tmp_path, 2).steps() == [LEFT]


async def test_in_a_job_that_is_not_elastic_who_is_told_too_late_leaves_with_the_others(
    tmp_path: Path, told_late: Callable[[int, int], list[bool]]
) -> None:
    asked = told_late(0, 2)
    async with crew() as members:
        lives = [members.hire(told(1), least=2, most=2, elastic=False, checkpoints=tmp_path, save_every=RARELY) for _ in range(2)]
        await members.wait()
    assert asked == [True]
    assert [(life.left, life.error) for life in lives] == [(True, None)] * 2
    assert Folder(tmp_path, 2).steps() == [LEFT]


async def test_who_cannot_save_leaves_nevertheless(tmp_path: Path) -> None:
    async def train(cluster: Cluster, state: State, life: Life) -> object:
        if cluster.rank == 0:
            spoil(tmp_path)
        return await told(1)(cluster, state, life)

    async with crew() as members:
        lives = [members.hire(train, least=2, most=2, elastic=False, checkpoints=tmp_path, save_every=RARELY) for _ in range(2)]
        await members.wait()
    stayed, left = sorted(lives, key=lambda life: life.left)
    assert left.left
    assert isinstance(stayed.error, Preempted)
    assert f"the checkpoint of step {LEFT} cannot be written: rank 0: " in str(stayed.error)
