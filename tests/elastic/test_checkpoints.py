"""State that is lost from memory is found in files: trainings that go on from their last checkpoint."""

import asyncio
import errno
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shardnet import AsyncFSDP, Cluster
from shardnet.backend.gather import gather_json
from shardnet.checkpoint.folder import Folder
from shardnet.checkpoint.manifest import Manifest
from shardnet.elastic import State
from shardnet.elastic.saves import Saves, Saving
from shardnet.errors import EndNotSaved, PeerLost, ShardnetError, UsageError
from shardnet.testing import local_cluster
from tests.elastic.crew import Died, Life, crew
from tests.elastic.trainer import STEPS, check, dies, trainer, until_joined

SAVE_EVERY = 2


def wanting(folder: Path) -> dict[str, Any]:
    return {"checkpoints": folder, "save_every": SAVE_EVERY}


async def test_more_are_lost_than_there_were_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two neighbours of four die at once, in the step after 5: the others go on from the checkpoint of step 4."""
    both = asyncio.Barrier(2)

    async def together(step: int) -> None:
        if step == 5:
            await both.wait()

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        doomed = cluster.rank in (1, 2) and cluster.topology.epoch == 1
        return await (trainer(dies("begin", 5), before=together) if doomed else trainer())(cluster, state, life)

    async with crew() as members:
        lives = [members.hire(train, least=2, most=4, **wanting(tmp_path)) for _ in range(4)]
        await members.wait()
    survivors = [life for life in lives if life.error is None]
    (_, behind), *rest = {tuple((world, step) for _, _, world, step in life.epochs) for life in survivors}
    assert not rest
    assert behind in ((2, 4), (2, 2))  # the one of step 4 may not have been finished
    check(survivors)
    assert f"it goes on behind step {behind[1]}, from checkpoint" in caplog.text
    assert "the state of step 5 (epoch 1) is lost: more workers are gone than there were copies" in caplog.text
    assert Folder(tmp_path, 2).steps() == [STEPS, STEPS - SAVE_EVERY]


async def test_all_are_gone_and_others_begin_where_they_were(tmp_path: Path) -> None:
    """The new ones are as many as before, or not."""
    async with crew() as members:
        for _ in range(2):
            members.hire(trainer(dies("step", 5)), least=2, most=2, join_s=3.0, **wanting(tmp_path))  # who hears of the other's death waits
        await members.wait()
    async with crew() as members:
        others = [members.hire(trainer(), least=3, most=3, **wanting(tmp_path)) for _ in range(3)]
        await members.wait()
    begun = {(world, step) for life in others for _, _, world, step in life.epochs}
    assert begun in ({(3, 4)}, {(3, 2)})  # the one of step 4 may not have been finished
    check(others)


async def test_one_that_a_loss_has_cut_short_is_made_good(tmp_path: Path) -> None:
    """Also that of the last step, after which nobody would begin another."""
    async with crew() as members:
        survivors = [members.hire(trainer(), least=2, most=3, **wanting(tmp_path)) for _ in range(2)]
        members.hire(trainer(dies("committed", STEPS)), least=2, most=3, **wanting(tmp_path))
        await members.wait()
    assert [life.epochs[-1][2:] for life in survivors] == [(2, STEPS)] * 2
    check(survivors)
    assert Folder(tmp_path, 2).steps() == [STEPS, STEPS - SAVE_EVERY]


async def test_one_that_was_due_is_made_once(tmp_path: Path) -> None:
    """In an epoch that goes on after that step, or from a later one."""
    async with local_cluster(1) as (backend,), AsyncFSDP(nn.Linear(2, 2), backend) as model:
        made = []
        for behind, there in ((0, []), (2, []), (4, [4]), (4, [4]), (5, [4]), (6, [6, 4])):
            saves = Saves(Saving(tmp_path, every=3))
            saves.begin_epoch(backend, model)
            await saves.make_good(behind, {})
            await saves.saved()
            assert Folder(tmp_path, 2).steps() == there
            made += [Folder(tmp_path, 2).of(step).stat().st_ino for step in there if step == 4]
    assert len(set(made)) == 1


async def test_a_failure_of_an_earlier_epoch_is_not_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be told by those that were there, and others would end without an error."""

    def fill_up(folder: Folder, found: Manifest) -> None:
        raise OSError("the disk is full")

    async with local_cluster(1) as (backend,), AsyncFSDP(nn.Linear(2, 2), backend) as model:
        saves = Saves(Saving(tmp_path))
        saves.begin_epoch(backend, model)
        with monkeypatch.context() as context:
            context.setattr(Folder, "commit", fill_up)
            await saves.save(12, {})  # for workers that leave
            await saves.settle()
        assert await saves.end_error(12) is not None
        saves.begin_epoch(backend, model)
        saves.go_on_from(None)
        await saves.make_good(12, {})
        assert await saves.end_error(15) is None


async def test_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch may begin when the program has changed its directory."""
    monkeypatch.chdir(tmp_path)
    saves = Saves(Saving(Path("run"), every=1))
    monkeypatch.chdir("/")
    async with local_cluster(1) as (backend,), AsyncFSDP(nn.Linear(2, 2), backend) as model:
        saves.begin_epoch(backend, model)
        await saves.make_good(1, {})
        await saves.saved()
    assert Folder(tmp_path / "run", 2).steps() == [1]


@pytest.mark.parametrize(
    ("every", "steps", "due"),
    [
        (1, [1, 2, 3], [1, 2, 3]),
        (2, [1, 2, 3, 4], [2, 4]),
        (2, [1, 3, 5], [3, 5]),
        (3, [1, 3, 5, 7, 9, 11], [3, 7, 9]),
        (10, [25, 26, 29, 30], [25, 30]),
    ],
)
def test_one_is_due_at_the_first_step_that_passes_its_time(every: int, steps: list[int], due: list[int], tmp_path: Path) -> None:
    saves = Saves(Saving(tmp_path, every))
    assert [step for before, step in pairwise([0, *steps]) if saves.is_due(before, step)] == due
    assert not Saves(None).is_due(0, 1000)


async def test_who_is_lost_while_others_look_for_a_checkpoint_ends_the_epoch_and_not_the_training(tmp_path: Path) -> None:
    """They do not say goodbye to each other, as they do at the end of a training."""
    after: list[type[BaseException]] = []

    async def train(cluster: Cluster, state: State, life: Life) -> int:
        model = await cluster.shard(nn.Linear(3, 1))
        if cluster.world_size == 3 and cluster.rank == 1:
            everyone = cluster.backend.subgroup(range(3))
            await gather_json(everyone, {"offers": [], "wanted": [], "was_there": False}, "surviving state")  # as resume begins
            raise Died
        try:
            await state.resume(model)
        except PeerLost:
            try:
                await cluster.backend.barrier()
            except ShardnetError as error:
                after.append(type(error))
            raise
        return cluster.world_size

    async with crew() as members:
        lives = [members.hire(train, least=2, most=3, **wanting(tmp_path)) for _ in range(3)]
        await members.wait()
    assert sorted(life.result or 0 for life in lives) == [0, 2, 2]
    assert after == [PeerLost, PeerLost]


async def test_a_checkpoint_is_finished_before_newcomers_are_taken_in(tmp_path: Path) -> None:
    newcomers: list[Life] = []

    async def before(step: int) -> None:
        if step == SAVE_EVERY - 1:
            if not newcomers:
                newcomers.append(members.hire(trainer(), least=2, most=3, keep=STEPS, **wanting(tmp_path)))
            await until_joined(members.address, 3)

    async with crew() as members:
        first = [members.hire(trainer(before=before), least=2, most=3, keep=STEPS, **wanting(tmp_path)) for _ in range(2)]
        await members.wait()
        await members.wait()  # for the newcomer, too
    (newcomer,) = newcomers
    assert newcomer.epochs[0][2:] == (3, SAVE_EVERY)
    check([*first, newcomer])
    assert Folder(tmp_path, STEPS).steps() == list(range(STEPS, 0, -SAVE_EVERY))


async def test_nobody_waits_for_a_disk_before_newcomers_are_taken_in(tmp_path: Path, disk: threading.Event) -> None:
    """They come while the checkpoint of step 2 is written, and are taken in when it is there."""
    newcomers: list[Life] = []

    async def train(cluster: Cluster, state: State, life: Life) -> object:
        async def before(step: int) -> None:
            if (cluster.topology.epoch, step) == (1, 2):
                if cluster.rank == 0:
                    newcomers.append(members.hire(trainer(), least=2, most=3, keep=STEPS, **wanting(tmp_path)))
                while not cluster.joiners:  # noqa: ASYNC110 - nobody else is told
                    await asyncio.sleep(0)
            if step == 3:
                disk.set()

        return await trainer(before=before)(cluster, state, life)

    async with crew() as members:
        first = [members.hire(train, least=2, most=3, keep=STEPS, **wanting(tmp_path)) for _ in range(2)]
        await members.wait()
        await members.wait()  # for the newcomer, too
    assert {life.epochs[-1][2:] for life in (*first, *newcomers)} == {(3, 4)}
    check([*first, *newcomers])
    assert Folder(tmp_path, STEPS).steps() == list(range(STEPS, 0, -SAVE_EVERY))


async def test_a_checkpoint_that_cannot_be_written_does_not_end_a_training_but_its_end_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    finished: list[int] = []

    async def train(cluster: Cluster, state: State, life: Life) -> None:
        model = await cluster.shard(nn.Linear(3, 1))
        await state.resume(model)
        if cluster.rank == 0:
            spoil(tmp_path)
        for step in range(4):
            await state.commit(step + 1)
        finished.append(cluster.rank)

    async with crew() as members:
        lives = [members.hire(train, least=2, most=2, **wanting(tmp_path)) for _ in range(2)]
        await members.wait()
    assert sorted(finished) == [0, 1]
    for life in lives:
        assert isinstance(life.error, EndNotSaved)
        assert "the training is over, at step 4, but the checkpoint of step 4 cannot be written: rank 0: " in str(life.error)
        assert str(life.error).endswith(
            f"; {tmp_path} has no good one: see that the folder can be written, then start the job again, from the beginning"
        )
    for step in (2, 4):
        (line,) = [message for message in caplog.messages if f"the checkpoint of step {step} cannot be written" in message]
        assert line.endswith("; the training does not end because of this")


@pytest.mark.parametrize("elastic", [True, False])
async def test_a_training_that_is_over_stays_so_if_only_its_last_checkpoint_has_failed(
    elastic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waits for a place, and one that would replace another, are told so; otherwise they would train everything again."""
    commit = Folder.commit

    def fill_up(folder: Folder, found: Manifest) -> None:
        if found.step == 4:
            raise OSError("the disk is full")
        commit(folder, found)

    monkeypatch.setattr(Folder, "commit", fill_up)
    begun: list[int] = []
    spares: list[Life] = []

    async def train(cluster: Cluster, state: State, life: Life) -> None:
        begun.append(cluster.topology.epoch)
        await state.resume(await cluster.shard(nn.Linear(3, 1)))
        await state.commit(2)
        if elastic and cluster.rank == 0:
            spares.append(members.hire(train, least=2, most=2, **wanting(tmp_path)))
        if elastic:
            await until_joined(members.address, 3)
        await state.commit(4)

    async with crew() as members:
        lives = [members.hire(train, least=2, most=2, elastic=elastic, **wanting(tmp_path)) for _ in range(2)]
        await members.wait()
        if elastic:
            spares.append(members.hire(train, least=2, most=2, replacement=True, **wanting(tmp_path)))
        await members.wait()  # for the spares, too
    for life in lives:
        assert isinstance(life.error, EndNotSaved)
        assert str(life.error) == (
            "the training is over, at step 4, but the checkpoint of step 4 was not written: rank 0: the disk is full; "
            f"the last good one in {tmp_path} is of step 2: see that the folder can be written, then start the job again, "
            "which does the steps after it once more"
        )
    assert [(life.error, life.result) for life in spares] == [(None, None)] * len(spares)
    assert begun == [1, 1]


async def test_the_end_is_told_though_nobody_can_see_which_checkpoints_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = Saves(Saving(tmp_path / "file" / "folder", every=1))
    (tmp_path / "file").touch()

    def steps(_: Folder) -> list[int]:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with local_cluster(1) as (backend,), AsyncFSDP(nn.Linear(2, 2), backend) as model:
        saves.begin_epoch(backend, model)
        await saves.make_good(1, {})
        monkeypatch.setattr(Folder, "steps", steps)
        error = await saves.end_error(1)
    assert "folder cannot be read either (Input/output error): see that the folder can be written, then" in str(error)


async def test_a_folder_that_cannot_be_written_is_told_at_the_beginning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "file" / "folder"
    (tmp_path / "file").touch()
    told: list[str] = []

    async def train(cluster: Cluster, state: State, life: Life) -> None:
        model = await cluster.shard(nn.Linear(3, 1))
        await state.resume(model)
        told.extend(caplog.messages)

    async with crew() as members:
        lives = [members.hire(train, least=2, most=2, **wanting(place)) for _ in range(2)]
        await members.wait()
    assert [life.error for life in lives] == [None, None]
    assert f"checkpoints cannot be written to {place}: Not a directory; the training goes on without them" in told


def spoil(folder: Path) -> None:
    """Make the folder useless: nothing can be written there from now on."""
    folder.rmdir()
    folder.touch()


async def test_the_last_step_is_saved_when_asked_for(tmp_path: Path) -> None:
    async def train(cluster: Cluster, state: State, life: Life) -> None:
        await state.resume(await cluster.shard(nn.Linear(3, 1)), position=0)
        for step in range(state.step, 3):
            await state.commit(step + 1, position=step * 10)
        await state.save()
        await state.save()  # it has one already
        await state.saved()
        life.result = state.step, state.values

    async with crew() as members:
        lives = [members.hire(train, least=2, most=2, **wanting(tmp_path)) for _ in range(2)]
        await members.wait()
    assert Folder(tmp_path, 2).steps() == [3, 2]
    async with crew() as members:
        lives = [members.hire(train, least=1, most=1, **wanting(tmp_path))]
        await members.wait()
    assert lives[0].error is None
    assert lives[0].epochs == []
    assert Folder(tmp_path, 2).steps() == [3, 2]


async def test_the_end_is_saved_by_all_though_one_came_later(tmp_path: Path) -> None:
    """The others began a checkpoint of that very step before it came."""
    newcomers: list[Life] = []

    async def train(cluster: Cluster, state: State, life: Life) -> None:
        await state.resume(await cluster.shard(nn.Linear(3, 1)))
        if state.step == 0:
            if not newcomers:
                newcomers.append(members.hire(train, least=1, most=2, **wanting(tmp_path)))
            await until_joined(members.address, 2)
            await state.commit(SAVE_EVERY)
        await state.save()

    async with crew() as members:
        first = members.hire(train, least=1, most=2, **wanting(tmp_path))
        await members.wait()
        await members.wait()  # for the newcomer, too
    assert [life.error for life in (first, *newcomers)] == [None, None]
    assert Folder(tmp_path, 2).steps() == [SAVE_EVERY]


@pytest.mark.parametrize(
    ("settings", "words"), [({"save_every": 0}, "at least 1, got 0 and 2"), ({"keep": 0}, "at least 1, got 1000 and 0")]
)
async def test_what_is_refused(settings: dict[str, int], words: str, tmp_path: Path) -> None:
    wanted: dict[str, Any] = {"checkpoints": tmp_path, **settings}
    async with crew() as members:
        life = members.hire(trainer(), least=1, most=1, **wanted)
        await members.wait()
    assert isinstance(life.error, UsageError)
    assert words in str(life.error)
