"""What is saved comes back, with any number of ranks and any distribution over them."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardnet import AsyncFSDP, ShardingStrategy, unbroken
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints, Loaded, rank_file
from shardnet.checkpoint.blocks import BLOCK_BYTES, is_intact
from shardnet.checkpoint.folder import Folder
from shardnet.checkpoint.looking import whole_weights
from shardnet.checkpoint.manifest import Manifest
from shardnet.errors import CheckpointError, CollectiveMismatch, PeerLost, UsageError
from shardnet.testing import each_error, each_rank, local_cluster, same_bits
from shardnet.zero import ZeroOptimizer
from tests.checkpoint.training import Layout, Training
from tests.fsdp.models import Weighted

FULL, HYBRID, NONE, GRADS = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy.NO_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
)
STEPS, SAVED = 6, 3


async def losses_of(layout: Layout, folder: Path, first: int, last: int, *, save: bool = False, load: bool = False) -> list[float]:
    async def train(backend: Backend) -> list[float]:
        async with Training(backend, folder, layout, seed=1 if load else 0) as training:
            if load:
                found = await training.checkpoints.load()
                assert (found.step, found.values) == (first, {"position": first * 10})
            losses = await training.steps(first, last)
            if save:
                await training.checkpoints.save(last, position=last * 10)
                await training.checkpoints.wait()
            return losses

    async with local_cluster(layout.ranks) as ranks:
        every = await each_rank(ranks, train)
    assert all(each == every[0] for each in every)
    return every[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Layout(4), Layout(4)),
        (Layout(4), Layout(3, NONE)),
        (Layout(4), Layout(6, HYBRID, per_node=3)),
        (Layout(3, NONE), Layout(2)),
        (Layout(4, HYBRID, per_node=2), Layout(3)),
        (Layout(2, GRADS), Layout(1)),
        (Layout(1), Layout(4, HYBRID, per_node=2)),
    ],
    ids=lambda layout: str(layout),
)
async def test_the_loss_goes_on_as_if_nothing_had_happened(before: Layout, after: Layout, tmp_path: Path) -> None:
    whole = await losses_of(before, tmp_path / "unused", 0, STEPS)
    first = await losses_of(before, tmp_path / "run", 0, SAVED, save=True)
    assert first == whole[:SAVED]
    rest = await losses_of(after, tmp_path / "run", SAVED, STEPS, load=True)
    assert rest == pytest.approx(whole[SAVED:], abs=1e-5)
    if before == after:
        assert rest == whole[SAVED:]


async def test_zero_optimizers_with_their_modules(tmp_path: Path) -> None:
    def make(backend: Backend, seed: int) -> tuple[nn.Module, ZeroOptimizer, Checkpoints]:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.Adam, backend, module=module, lr=1e-2)
        return module, optimizer, Checkpoints(backend, tmp_path, module, optimizer)

    def step(module: nn.Module, optimizer: ZeroOptimizer) -> None:
        torch.autograd.backward(module(torch.ones(2, 7) * torch.tensor([[1.0], [3.0]])).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()

    async def save(backend: Backend) -> dict[str, Any]:
        module, optimizer, checkpoints = await asyncio.to_thread(make, backend, 0)
        await asyncio.to_thread(step, module, optimizer)
        await checkpoints.save(1)
        await checkpoints.wait()
        await asyncio.to_thread(step, module, optimizer)
        return {name: value.clone() for name, value in module.state_dict().items()}

    async def load(backend: Backend) -> dict[str, Any]:
        module, optimizer, checkpoints = await asyncio.to_thread(make, backend, 0)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        assert await checkpoints.load() == Loaded(1, {}, tmp_path / "step-00000001")
        await asyncio.to_thread(step, module, optimizer)
        return {name: value.clone() for name, value in module.state_dict().items()}

    async with local_cluster(3) as ranks:
        wanted = (await each_rank(ranks, save))[0]
    async with local_cluster(2) as ranks:
        for state in await each_rank(ranks, load):
            for name, value in wanted.items():
                torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("shape", "before", "after", "sizes"), [((9,), 3, 2, [5, 4]), ((4, 3), 2, 4, [3, 3, 3, 3])])
async def test_elements_are_dealt_out_anew(shape: tuple[int, ...], before: int, after: int, sizes: list[int], tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight.sum()

    async def save(backend: Backend) -> None:
        async with AsyncFSDP(Plain(), backend) as model:
            await saved(Checkpoints(backend, tmp_path, model), 7)

    async def load(backend: Backend) -> torch.Tensor:
        module = Plain()
        nn.init.zeros_(module.weight)
        async with AsyncFSDP(module, backend) as model:
            await Checkpoints(backend, tmp_path, model).load()
            return next(model.parameters()).detach().clone()

    async with local_cluster(before) as ranks:
        await each_rank(ranks, save)
    async with local_cluster(after) as ranks:
        parts = await each_rank(ranks, load)
    assert [part.numel() for part in parts] == sizes
    assert same_bits(torch.cat(parts), torch.arange(float(torch.Size(shape).numel())))


def names_in(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()}


async def saved(checkpoints: Checkpoints, step: int, **values: Any) -> None:
    await checkpoints.save(step, **values)
    await checkpoints.wait()


async def test_a_rank_reads_what_it_holds_and_little_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elements = 3_000_000
    read: list[int] = []

    async def save(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(*range(elements)), backend) as model:
            await saved(Checkpoints(backend, tmp_path, model), 1)

    async def load(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(*([0.0] * elements)), backend) as model:
            await Checkpoints(backend, tmp_path, model).load()
            mine = next(model.parameters()).detach()
            start = -(-elements // 3) * backend.rank
            assert same_bits(mine, torch.arange(start, start + mine.numel(), dtype=torch.float32))

    def counted(blocks: torch.Tensor, first: int, sums: list[int]) -> bool:
        read.append(blocks.nbytes)
        return is_intact(blocks, first, sums)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, save)
    monkeypatch.setattr(rank_file, "is_intact", counted)
    async with local_cluster(3) as ranks:
        await each_rank(ranks, load)
    assert 4 * elements <= sum(read) <= 4 * elements + 4 * BLOCK_BYTES  # of the first and the last rank one end, of the other one two


async def test_what_is_saved_is_what_there_was_when_it_was_called(tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(1, 2, 3), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            parameter = next(model.parameters())
            wanted = parameter.detach().clone()
            await checkpoints.save(1, names=["a"], table={"b": (1, 2.5, None)})
            with torch.no_grad():
                parameter.fill_(99.0)
            await checkpoints.wait()
            found = await checkpoints.load()
            assert found is not None
            assert found.values == {"names": ["a"], "table": {"b": (1, 2.5, None)}}
            assert same_bits(parameter.detach(), wanted)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)


async def test_what_each_rank_has_for_itself_comes_back_to_it(tmp_path: Path) -> None:
    """These are buffers and random generators. A rank that was not there before gets rank 0's buffers, and keeps its own generators."""

    async def save(backend: Backend) -> list[Any]:
        norm = nn.BatchNorm1d(3)
        async with AsyncFSDP(nn.Sequential(nn.Linear(3, 3), norm), backend) as model:
            mean_of(norm).fill_(backend.rank)
            await saved(Checkpoints(backend, tmp_path, model), 1)
        return []

    async def load(backend: Backend) -> float:
        norm = nn.BatchNorm1d(3)
        async with AsyncFSDP(nn.Sequential(nn.Linear(3, 3), norm), backend) as model:
            assert await Checkpoints(backend, tmp_path, model).load()
            return float(mean_of(norm)[0])

    async with local_cluster(2) as ranks:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)
        await each_rank(ranks, save)
        wanted = random.random(), np.random.rand(), torch.rand(3)
    async with local_cluster(3) as ranks:
        assert await each_rank(ranks, load) == [0.0, 1.0, 0.0]
        found = random.random(), np.random.rand(), torch.rand(3)
    assert found[:2] == wanted[:2]
    assert same_bits(found[2], wanted[2])


def mean_of(norm: nn.BatchNorm1d) -> torch.Tensor:
    assert norm.running_mean is not None
    return norm.running_mean


async def test_loading_takes_back_what_the_optimizer_had_nothing_of(tmp_path: Path) -> None:
    """A checkpoint from before the first step is loaded after it: momentum must start again, too."""

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            optimizer = torch.optim.Adam(model.parameters())
            checkpoints = Checkpoints(backend, tmp_path, model, optimizer)
            await saved(checkpoints, 0)
            await model.backward((await model(torch.ones(2))).sum())
            await model.step(optimizer)
            assert any(optimizer.state.values())
            await checkpoints.load()
            assert not any(optimizer.state.values())

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)


async def test_the_latest_are_kept(tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model, keep=2)
            for step in (1, 2, 9, 10):
                await saved(checkpoints, step)
            await saved(checkpoints, 10, again=True)  # it takes the other one's place
            found = await checkpoints.load()
            assert found is not None
            assert (found.step, found.values) == (10, {"again": True})

    (tmp_path / ".unfinished-0123").mkdir()
    (tmp_path / "step-what").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "manifest.json").touch()
    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert names_in(tmp_path) == {"step-00000009", "step-00000010", "step-what", "step-7"}
    assert Folder(tmp_path, 2).steps() == [10, 9]


async def test_a_save_behind_a_load_that_went_back_loses_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the load has left out is not what the next one takes, and does not count among the latest."""

    async def work(backend: Backend, *steps: int, load: int | None = None, keep: int = 3) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model, keep=keep)
            if load is not None:
                found = await checkpoints.load()
                assert found is not None
                assert found.step == load
            for step in steps:
                await saved(checkpoints, step)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, lambda rank: work(rank, 100, 200, 300))
        for step in (200, 300):
            (tmp_path / f"step-{step:08d}" / "rank-00000-of-00002.safetensors").write_bytes(b"")
        await each_rank(ranks, lambda rank: work(rank, load=100))
        assert Folder(tmp_path, 2).steps() == [300, 200, 100], "whoever only loads may be another program"
        await each_rank(ranks, lambda rank: work(rank, 150, load=100, keep=2))
        assert names_in(tmp_path) == {f"step-{step:08d}" for step in (100, 150)} | {f"left-out-step-{step:08d}" for step in (200, 300)}
        assert "step-00000300 is left out from now on, and is now left-out-step-00000300: step 150 was saved after it" in caplog.text
        await each_rank(ranks, lambda rank: work(rank, load=150))


async def test_a_training_that_begins_anew_in_a_folder_keeps_its_own(tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            for _ in range(2):
                checkpoints = Checkpoints(backend, tmp_path, model, keep=1)
                for step in (10, 20):
                    await saved(checkpoints, step)
                    assert await checkpoints.latest() == step

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert names_in(tmp_path) == {"step-00000020", "left-out-step-00000020"}


def committed(folder: Folder, step: int, id_: str) -> None:
    folder.begin(id_)
    folder.commit(Manifest(id_, step, (), (), {}, (), ()))


def id_of(path: Path) -> str:
    found: str = json.loads((path / "manifest.json").read_text().split("\n", 1)[1])["id"]
    return found


def test_nothing_is_put_aside_over_what_was(tmp_path: Path) -> None:
    folder = Folder(tmp_path, 1)
    for id_ in ("first", "second", "third"):
        committed(folder, 9, id_)
        committed(folder, 1, "low")
    assert {each.name: id_of(each) for each in tmp_path.iterdir()} == {
        "step-00000001": "low",
        "left-out-step-00000009": "first",
        "left-out-step-00000009-2": "second",
        "left-out-step-00000009-3": "third",
    }


class Killed(BaseException):
    """In place of kill -9: nothing can catch it and go on."""


@pytest.mark.parametrize("end", [OSError(5, "Input/output error"), Killed()], ids=["an error", "kill -9"])
def test_one_that_is_replaced_is_there_until_the_new_one_is(end: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the second of two renames does not take place."""
    folder = Folder(tmp_path, 1)
    committed(folder, 3, "old")
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        if path == folder.unfinished("new"):
            raise end
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(type(end)):
        committed(folder, 3, "new")
    monkeypatch.undo()
    assert folder.steps() == [3]
    assert id_of(folder.of(3)) == "old"
    folder.begin("next")
    assert names_in(tmp_path) == {"step-00000003", ".unfinished-next"}
    assert id_of(folder.of(3)) == "old"
    committed(folder, 3, "newer")
    assert names_in(tmp_path) == {"step-00000003"}
    assert id_of(folder.of(3)) == "newer"


def test_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    """It only has the name of one."""
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "mine").write_text("data")
    (tmp_path / "step-00000002").write_text("data")
    folder = Folder(tmp_path, 2)
    for step in (1, 2):
        committed(folder, step, f"id{step}")
    assert folder.steps() == [2, 1]
    assert names_in(tmp_path) == {f"{prefix}step-0000000{step}" for prefix in ("", "left-out-") for step in (1, 2)}
    assert (tmp_path / "left-out-step-00000001" / "mine").read_text() == "data"
    assert (tmp_path / "left-out-step-00000002").read_text() == "data"


def test_of_a_link_to_a_checkpoint_only_the_link_is_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "run", 1)
    committed(folder, 1, "id1")
    folder.of(1).rename(tmp_path / "moved")
    folder.of(1).symlink_to(tmp_path / "moved")
    committed(folder, 2, "id2")
    assert names_in(folder.path) == {"step-00000002"}
    assert id_of(tmp_path / "moved") == "id1"


def test_what_dies_while_it_removes_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(tmp_path, 1)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    for step in (1, 2, 3):
        folder.unfinished(f"id{step}").mkdir()
        folder.commit(Manifest(f"id{step}", step, (), (), {}, (), ()))
    assert folder.steps() == [3]
    assert {name for name in names_in(tmp_path) if name.startswith("step-")} == {"step-00000003"}
    monkeypatch.undo()
    folder.sweep()
    assert names_in(tmp_path) == {"step-00000003"}


async def test_nothing_there(tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            assert await Checkpoints(backend, tmp_path / "none", model).load() is None

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert names_in(tmp_path) == set()


async def test_a_load_takes_nothing_away_from_another_programs_save(tmp_path: Path) -> None:
    """Which has this folder, with files in it, while it writes."""
    folder = Folder(tmp_path, 2)
    committed(folder, 1, "id1")
    (unfinished := folder.unfinished("0123")).mkdir()

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            with pytest.raises(CheckpointError):  # this one has no files
                await checkpoints.load()
            assert unfinished.is_dir()
            await backend.barrier()
            await saved(checkpoints, 2)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert names_in(tmp_path) == {"step-00000001", "step-00000002"}


async def test_a_relative_folder_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, "run", model)
            await backend.barrier()
            monkeypatch.chdir("/")
            await saved(checkpoints, 1)

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert names_in(tmp_path / "run") == {"step-00000001"}


async def test_saves_and_loads_at_once_wait_for_each_other(tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Weighted(), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            await checkpoints.save(1)
            _, _, found, latest, _ = await asyncio.gather(
                *(checkpoints.save(2, a=2), checkpoints.save(3, a=3), checkpoints.load(), checkpoints.latest(), checkpoints.save(4))
            )
            assert found is not None
            assert (found.step, found.values, latest) == (3, {"a": 3}, 3)
            await checkpoints.wait()
            assert await checkpoints.latest() == 4

    async with local_cluster(2) as ranks:
        await each_rank(ranks, work)


# --- what goes wrong


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
    assert all("no checkpoint of step 1: rank 1" in str(error) and "all ranks must see one folder" in str(error) for error in errors)
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
            with pytest.raises(CheckpointError, match="no checkpoint of step 1: rank 0: the disk is gone"):
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
            assert "give the sharded model that has it" in str(error)


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
            assert "other things were given when" in str(error)
        for error in await each_error(ranks, lambda rank: load(rank, False)):
            assert isinstance(error, UsageError)
            assert "is of another model: weight had 4 elements and has 5" in str(error)
