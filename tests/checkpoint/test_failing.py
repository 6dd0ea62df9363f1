"""Saves and loads that fail, are cancelled, or lose a rank: all ranks hear of it, and the checkpoint before is there."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from shardnet import AsyncFSDP, unbroken
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints
from shardnet.checkpoint import checkpoints as checkpoints_module
from shardnet.checkpoint.folder import Folder
from shardnet.checkpoint.looking import whole_weights
from shardnet.checkpoint.manifest import Manifest
from shardnet.errors import CheckpointError, ClosedError, CollectiveMismatch, PeerLost, StateError, UsageError
from shardnet.testing import each_error, each_rank, local_cluster, loopback_cluster
from tests.checkpoint.saving import names_in, saved
from tests.fsdp.models import Weighted


async def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing(tmp_path: Path) -> None:
    """For example a rank that does not see the others' folder."""

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path / ("there" if backend.rank == 0 else "elsewhere"), model)
            await checkpoints.save(1)
            await checkpoints.wait()

    async with local_cluster(2) as ranks:
        errors = await each_error(ranks, work)
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert all(
        "the checkpoint of step 1 was not written: rank 1" in str(error) and "give all ranks one folder" in str(error) for error in errors
    )
    assert names_in(tmp_path / "there") == set()


async def test_rank_0_cannot_make_it_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks hear of it, and the next save works as usual."""

    commit = Folder.commit

    def made(folder: Folder, found: Manifest) -> None:
        if found.step == 1:
            raise OSError("the disk is gone")
        commit(folder, found)

    monkeypatch.setattr(Folder, "commit", made)

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            with pytest.raises(CheckpointError, match="the checkpoint of step 1 was not written: rank 0: the disk is gone"):
                await saved(checkpoints, 1)
            await backend.barrier()
            assert await asyncio.to_thread(names_in, tmp_path) == set()
            await backend.barrier()
            await saved(checkpoints, 2)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert names_in(tmp_path) == {"step-00000002"}


async def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            await Checkpoints(backend, tmp_path / "file" / "run", model).save(4)

    async with local_cluster(2) as ranks:
        for error in await each_error(ranks, work):
            assert isinstance(error, CheckpointError)
            assert "the checkpoint of step 4 cannot be written: rank 0: " in str(error)


class Failing:
    """Something with a small state, which one rank cannot give, or not take."""

    def __init__(self, *, gives: bool = True, takes: bool = True) -> None:
        self.gives, self.takes = gives, takes

    def state_dict(self) -> dict[str, int]:
        if not self.gives:
            raise KeyError("what it has")
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.takes:
            raise MemoryError("for what it had")


async def test_what_fails_on_one_rank_is_told_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: nobody waits. The next save and load are as good as ever."""

    def no_memory(*_: object) -> None:
        raise MemoryError("none left")

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            failing = Failing(gives=backend.rank != 0)
            checkpoints = Checkpoints(backend, tmp_path, model, failing)
            with pytest.raises(CheckpointError, match=r"the state of step 1 cannot be saved: rank 0: KeyError\('what it has'\)"):
                await checkpoints.save(1)
            failing.gives = True
            if backend.rank == 1:
                monkeypatch.setattr(checkpoints._snapshot, "take", no_memory)
            with pytest.raises(CheckpointError, match=r"the state of step 1 cannot be saved: rank 1: MemoryError\('none left'\)"):
                await checkpoints.save(1)
            monkeypatch.undo()
            await backend.barrier()
            await saved(checkpoints, 1)
            failing.takes = backend.rank != 1
            with pytest.raises(
                CheckpointError, match=r"the checkpoint of step 1 cannot be loaded: rank 1: MemoryError\('for what it had'\)"
            ):
                await checkpoints.load()
            failing.takes = True
            assert await checkpoints.load()

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert names_in(tmp_path) == {"step-00000001"}


async def test_a_module_that_is_sharded_behind_our_back_is_refused_on_all_ranks(tmp_path: Path) -> None:
    """Only rank 0 writes down what modules are made of."""

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model.fsdp.module)
            await saved(checkpoints, 1)

    async with local_cluster(2) as ranks:
        for error in await each_error(ranks, work):
            assert isinstance(error, UsageError)
            assert "give the sharded model that contains it" in str(error)


@pytest.mark.parametrize("step", [-1, 1e3, "1", None])
async def test_a_step_that_is_none(step: Any, tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            await Checkpoints(backend, tmp_path, model).save(step)

    async with local_cluster(2) as ranks:
        for error in await each_error(ranks, work):
            assert isinstance(error, UsageError)
            assert f"must be a whole number from 0 on, got {step!r}" in str(error)
    assert names_in(tmp_path) == set()


async def test_ranks_that_save_different_steps(tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            await Checkpoints(backend, tmp_path, model).save(backend.rank)

    async with local_cluster(2) as ranks:
        errors = await each_error(ranks, work)
    assert all(isinstance(error, CollectiveMismatch) for error in errors)
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize("ends", ["the cluster", "the task"])
async def test_a_save_that_is_not_finished_when_the_program_ends_is_told(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, and not as an exception of a task that nobody has retrieved."""
    written = asyncio.Event()

    async def write(function: Callable[..., object], *arguments: object) -> object:
        await written.wait()
        return await asyncio.to_thread(function, *arguments)

    monkeypatch.setattr(checkpoints_module, "in_idle_thread", write)
    saves: list[Checkpoints] = []

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            saves.append(Checkpoints(backend, tmp_path, model))
            await saves[-1].save(1)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
        if ends == "the task":
            for each in saves:
                assert each._writing is not None
                each._writing.cancel()
    written.set()
    for each in saves:
        assert each._writing is not None
        await asyncio.wait([each._writing])
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    (line,) = told
    assert line.startswith("the checkpoint of step 1 was not finished: ")
    assert "await Checkpoints.wait() before the cluster closes" in line
    if ends == "the cluster":
        with pytest.raises(ClosedError):
            await saves[0].wait()


async def test_calls_on_another_event_loop_are_told_what_to_do(tmp_path: Path) -> None:
    """Such as those of a plain loop in a thread, which has no event loop of its own: asyncio.run makes one for each call, and ends it."""

    def train(checkpoints: Checkpoints, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.run(checkpoints.save(1))
        for call in (checkpoints.save(2), checkpoints.wait(), checkpoints.load()):
            with pytest.raises(StateError, match=r"begun on another event loop .* asyncio\.run_coroutine_threadsafe"):
                asyncio.run(call)
        again = Checkpoints(checkpoints._backend, tmp_path, Weighted())
        for good in (again.save(3), again.save(4), again.wait()):
            asyncio.run_coroutine_threadsafe(good, loop).result()

    async def work(backend: Backend) -> None:
        await asyncio.to_thread(train, Checkpoints(backend, tmp_path, Weighted()), asyncio.get_running_loop())

    async with loopback_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert {"step-00000003", "step-00000004"} <= names_in(tmp_path)


async def test_a_rank_is_lost_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That checkpoint does not exist, and the one before is found."""
    held, begun = asyncio.Event(), asyncio.Event()

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            await saved(checkpoints, 1)
            if backend.rank == 1:
                monkeypatch.setattr(checkpoints, "_write", lambda *_: held.wait())
                await checkpoints.save(2)
                await begun.wait()
                backend.abort()
                held.set()
                return
            await checkpoints.save(2)
            begun.set()
            with pytest.raises(PeerLost, match="rank 1"):
                await checkpoints.wait()

    async def load(backend: Backend) -> int:
        async with AsyncFSDP(Weighted(), backend) as model:
            found = await Checkpoints(backend, tmp_path, model).load()
            return -1 if found is None else found.step

    async with local_cluster(2) as ranks:
        await asyncio.gather(*map(work, ranks), return_exceptions=False)
    async with local_cluster(2) as ranks:
        assert await each_rank(ranks, load) == [1, 1]
    assert {name for name in names_in(tmp_path) if not name.startswith(".unfinished-")} == {"step-00000001"}


async def test_a_save_that_is_cancelled_takes_its_copy_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far each rank is. So the ranks stay together, and the saved data is that step's."""
    monkeypatch.setattr(unbroken, "GRACE_S", 20.0)  # this does not test how fast a busy machine is

    async def save(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model, keep=20)
            for step in range(1, 11):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(step)
                await checkpoints.wait()
                saving = asyncio.create_task(checkpoints.save(step))
                for _ in range(7 * step if backend.rank else step):
                    await asyncio.sleep(0)
                saving.cancel()
                await asyncio.wait([saving])
            await checkpoints.wait()

    async with local_cluster(2) as ranks:
        await each_rank(ranks, save)
    for step in range(1, 11):
        (weight,) = whole_weights(tmp_path / f"step-{step:08d}").values()
        assert bool((weight == step).all())


async def test_another_model_other_things_and_wrong_calls(tmp_path: Path) -> None:
    async def save(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            with pytest.raises(UsageError, match="keep must be at least 1 checkpoint, got 0"):
                Checkpoints(backend, tmp_path, model, keep=0)
            with pytest.raises(UsageError, match=r"a int has no state_dict"):
                Checkpoints(backend, tmp_path, model, 5)
            with pytest.raises(UsageError, match="the state of step 1 cannot be saved: rank 0: a value of type PosixPath cannot be kept"):
                await Checkpoints(backend, tmp_path, model).save(1, where=tmp_path if backend.rank == 0 else None)
            await saved(Checkpoints(backend, tmp_path, model), 1)

    async def load(backend: Backend, other_things: bool) -> None:
        async with AsyncFSDP(Weighted(*range(4 + (not other_things))), backend) as model:
            things = [torch.optim.Adam(model.parameters())] if other_things else []
            await Checkpoints(backend, tmp_path, model, *things).load()

    async with local_cluster(2) as ranks:
        await each_rank(ranks, save)
        for error in await each_error(ranks, lambda rank: load(rank, True)):
            assert isinstance(error, UsageError)
            assert "differ from those given when" in str(error)
        for error in await each_error(ranks, lambda rank: load(rank, False)):
            assert isinstance(error, UsageError)
            assert "was saved from another model: weight had 4 elements and has 5" in str(error)
            assert "torch.compile" not in str(error)


async def test_a_model_that_torch_compile_has_renamed(tmp_path: Path) -> None:
    async def save(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            await saved(Checkpoints(backend, tmp_path, model), 1)

    async def load(backend: Backend) -> None:
        compiled = cast("nn.Module", torch.compile(Weighted(), backend="eager"))
        async with AsyncFSDP(compiled, backend) as model:
            await Checkpoints(backend, tmp_path, model).load()

    async with local_cluster(2) as ranks:
        await each_rank(ranks, save)
        for error in await each_error(ranks, load):
            assert isinstance(error, UsageError)
            assert "_orig_mod.weight had no elements and has 4, weight had 4 elements and has none; torch.compile(module) puts" in str(
                error
            )
