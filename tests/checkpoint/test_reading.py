"""Tensors that are read stay in the file's pages: the kernel has these in memory once, for all ranks of a node that read them. A
checkpoint that does not fit the model changes nothing, on no rank."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardnet import AsyncFSDP
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints, open_weights, read_weights, write_weights
from shardnet.checkpoint.looking import whole_weights
from shardnet.checkpoint.rank_file import RankFile, write_rank_file
from shardnet.errors import CheckpointError, UsageError
from shardnet.state import Piece, Span
from shardnet.testing import each_rank, local_cluster, same_bits
from shardnet.zero import ZeroOptimizer

Tensor = torch.Tensor
NUMEL = 2**20
WHOLE = Span("weight", 0, NUMEL)


def mapped_file(tensor: Tensor) -> str:
    """The file whose pages hold this tensor; none for memory of this process alone."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *name = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in addresses.split("-"))
        if first <= tensor.data_ptr() < end:
            return "".join(name)
    raise AssertionError(f"{tensor.data_ptr():#x} is mapped nowhere")


def test_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_weights(path, {"weight": torch.arange(NUMEL), "bias": torch.ones(NUMEL)})
    for _, tensor in read_weights(path):
        assert mapped_file(tensor) == str(path)
        assert mapped_file(tensor.clone()) != str(path)


def test_weights_that_are_opened_are_read_one_by_one(tmp_path: Path) -> None:
    tensors = {"weight": torch.arange(NUMEL), "bias": torch.ones(3)}
    write_weights(tmp_path / "model.safetensors", tensors)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        opened = open_weights(path)
        assert dict(opened).keys() == tensors.keys()
        assert all(torch.equal(opened[name], tensors[name]) for name in tensors)
        assert mapped_file(opened["weight"]) == str(tmp_path / "model.safetensors")
    held = opened["weight"]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        opened["bias"]
    assert torch.equal(held, tensors["weight"])
    with pytest.raises(KeyError):
        opened["none"]


def test_weights_of_a_folder_may_be_in_several_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_weights(tmp_path / f"{name}.safetensors", {name: torch.full((2,), len(name))})
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in ("one", "two")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_weights(tmp_path)
    assert {name: value.tolist() for name, value in opened.items()} == {"one": [3, 3], "two": [3, 3]}


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_folder_without_weights_is_told(tmp_path: Path, index: str) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: .*No such file"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        open_weights(tmp_path)


@pytest.mark.parametrize(("start", "stop"), [(0, NUMEL), (NUMEL // 4 + 1, NUMEL // 2)], ids=["all of a piece", "a part of it"])
def test_a_rank_of_a_checkpoint(tmp_path: Path, start: int, stop: int) -> None:
    values = torch.arange(NUMEL, dtype=torch.float32)
    entry = write_rank_file(tmp_path / "rank.safetensors", "id", [Piece(WHOLE, {"value": values})], {})
    read = RankFile(tmp_path, entry, "id").piece(WHOLE, start, stop).state["value"]
    assert torch.equal(read, values[start:stop])
    assert mapped_file(read) == str(tmp_path / "rank.safetensors")


class Scaled(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(torch.Size(shape).numel())).reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.sum()


class Blockwise(torch.optim.SGD):
    """Has a number for each 4 elements of a slice, as optimizers of 8 bits do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"scales": torch.arange(-(-parameter.numel() // 4))}


async def save(folder: Path, ranks: int) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(Scaled(4, 6), backend) as model:
            optimizer = Blockwise(model.parameters(), lr=0.1)
            await model.step(optimizer)
            checkpoints = Checkpoints(backend, folder, model, optimizer, Scaled(2))
            await checkpoints.save(1)
            await checkpoints.wait()

    async with local_cluster(ranks) as backends:
        await each_rank(backends, work)


@pytest.mark.parametrize(
    ("ranks", "shape", "average", "why"),
    [
        (2, (6, 4), (2,), r"was saved from another model: weight had shape \[4, 6\] and has \[6, 4\]"),
        (2, (4, 6), (3,), r"weight had shape \[2\] before, which does not fit the model now"),
        (
            1,
            (4, 6),
            (2,),
            "the optimizer's scales of 0/weight has 3 elements for a slice of 12: the optimizer does not treat each element by itself",
        ),
    ],
)
async def test_what_does_not_fit_changes_nothing(
    ranks: int, shape: tuple[int, ...], average: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    await save(tmp_path, 2)

    async def load(backend: Backend) -> None:
        async with AsyncFSDP(Scaled(*shape), backend) as model:
            optimizer = Blockwise(model.parameters(), lr=0.1)
            (parameter,) = model.parameters()
            nn.init.ones_(parameter)
            with pytest.raises(UsageError, match=why):
                await Checkpoints(backend, tmp_path, model, optimizer, Scaled(*average)).load()
            assert same_bits(parameter.detach(), torch.ones(parameter.numel()))
            assert not optimizer.state

    async with local_cluster(ranks) as backends:
        await each_rank(backends, load)


async def test_a_part_of_a_slice_does_not_get_what_belongs_to_the_slice(tmp_path: Path) -> None:
    """Tensors in a list, of which nobody can know whether they belong to elements."""

    async def save_whole(backend: Backend) -> None:
        async with AsyncFSDP(Scaled(4, 6), backend) as model:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for parameter in model.parameters():
                optimizer.state[parameter] = {"history": [torch.ones(24)]}
            checkpoints = Checkpoints(backend, tmp_path, model, optimizer)
            await checkpoints.save(1)
            await checkpoints.wait()

    async def load(backend: Backend) -> None:
        async with AsyncFSDP(Scaled(4, 6), backend) as model:
            with pytest.raises(UsageError, match="the optimizer's history of 0/weight has tensors in a list for a slice of 12"):
                await Checkpoints(backend, tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.1)).load()

    async with local_cluster(1) as backends:
        await each_rank(backends, save_whole)
    async with local_cluster(2) as backends:
        await each_rank(backends, load)


async def test_what_does_not_fit_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    await save(tmp_path, 2)

    async def load(backend: Backend) -> None:
        async with AsyncFSDP(Scaled(4, 6), backend) as model:
            optimizer = Blockwise(model.parameters(), lr=0.1)
            (parameter,) = model.parameters()
            nn.init.ones_(parameter)
            with pytest.raises(UsageError, match=r"rank 1: weight had shape \[2\] before"):
                await Checkpoints(backend, tmp_path, model, optimizer, Scaled(2 + backend.rank)).load()
            assert same_bits(parameter.detach(), torch.ones(parameter.numel()))

    async with local_cluster(2) as backends:
        await each_rank(backends, load)


async def test_what_is_converted_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    await save(tmp_path, 2)

    async def load(backend: Backend) -> None:
        async with AsyncFSDP(Scaled(4, 6).double(), backend) as model:
            await Checkpoints(backend, tmp_path, model, Blockwise(model.parameters(), lr=0.1), Scaled(2)).load()
            assert same_bits((await model.full_state_dict())["weight"], torch.arange(24.0).reshape(4, 6).double())

    async with local_cluster(2) as backends:
        await each_rank(backends, load)
    told = [record.message for record in caplog.records if "with other dtypes" in record.message]
    assert told == [
        f"{tmp_path / 'step-00000001'} was saved from a model with other dtypes, "
        "and its values are converted: weight from float32 to float64"
    ]


async def test_what_was_saved_while_parameters_were_gathered_is_whole(tmp_path: Path) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(nn.Sequential(Scaled(4, 6), Scaled(3)), backend, units=[Scaled]) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            summoned = model.fsdp.summon_full_params()
            await model.run(summoned.__enter__)
            await checkpoints.save(1)
            await checkpoints.wait()
            await model.run(summoned.__exit__, None, None, None)

    async with local_cluster(2) as backends:
        await each_rank(backends, work)
    wanted = nn.Sequential(Scaled(4, 6), Scaled(3)).state_dict()
    found = whole_weights(tmp_path / "step-00000001")
    assert list(found) == list(wanted)
    assert all(same_bits(found[name], tensor) for name, tensor in wanted.items())


async def test_parameters_that_a_zero_optimizer_gets_later_are_saved(tmp_path: Path) -> None:
    def make(backend: Backend, late: bool) -> tuple[nn.Sequential, ZeroOptimizer]:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        optimizer = ZeroOptimizer(module[1].parameters(), torch.optim.AdamW, backend, module=module, lr=0.1)
        if not late:
            optimizer.add_param_group({"params": list(module[0].parameters())})
        return module, optimizer

    def step(module: nn.Module, optimizer: ZeroOptimizer) -> None:
        module(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.wait()

    async def save(backend: Backend) -> dict[str, Tensor]:
        module, optimizer = await asyncio.to_thread(make, backend, True)
        checkpoints = Checkpoints(backend, tmp_path, module, optimizer)
        await asyncio.to_thread(step, module, optimizer)
        await checkpoints.save(1)
        await asyncio.to_thread(optimizer.add_param_group, {"params": list(module[0].parameters())})
        await asyncio.to_thread(step, module, optimizer)
        await checkpoints.save(2)
        await checkpoints.wait()
        await asyncio.to_thread(step, module, optimizer)
        return module.state_dict()

    async def load(backend: Backend) -> dict[str, Tensor]:
        module, optimizer = await asyncio.to_thread(make, backend, False)
        found = await Checkpoints(backend, tmp_path, module, optimizer).load()
        assert found is not None
        assert found.step == 2
        await asyncio.to_thread(step, module, optimizer)
        return module.state_dict()

    async with local_cluster(2) as backends:
        (wanted, _), (found, _) = await each_rank(backends, save), await each_rank(backends, load)
    assert all(same_bits(found[name], tensor) for name, tensor in wanted.items())


async def test_an_export_without_what_a_hook_computed_is_refused(tmp_path: Path) -> None:
    def twice(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}twice"] = 2 * state[f"{prefix}weight"]

    async def work(backend: Backend) -> None:
        module = Scaled(4, 6)
        module.register_state_dict_post_hook(twice)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        async with AsyncFSDP(module, backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            await checkpoints.save(1)
            await checkpoints.wait()

    async with local_cluster(2) as backends:
        await each_rank(backends, work)
    with pytest.raises(UsageError, match=r"step-00000001 lacks twice: a hook of the module's state_dict\(\) computed them"):
        whole_weights(tmp_path / "step-00000001")
