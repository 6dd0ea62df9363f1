"""What is saved comes back, with any number of ranks and any distribution over them."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shardnet import AsyncFSDP, ShardingStrategy
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints, Loaded, rank_file
from shardnet.checkpoint.blocks import BLOCK_BYTES, is_intact
from shardnet.checkpoint.folder import Folder
from shardnet.errors import CheckpointError
from shardnet.testing import each_rank, local_cluster, same_bits
from shardnet.zero import ZeroOptimizer
from tests.checkpoint.saving import committed, names_in, saved
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
        assert (
            "step-00000300 is not used from now on, and was renamed to left-out-step-00000300: step 150 was saved after it" in caplog.text
        )
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
