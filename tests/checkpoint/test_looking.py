"""Looking at checkpoints without a training, by `shardnet checkpoint` and by its functions."""

import asyncio
import json
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardnet import AsyncFSDP
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints
from shardnet.checkpoint.looking import problems, whole_weights
from shardnet.checkpoint.manifest import NAME, Manifest
from shardnet.cli.main import main
from shardnet.errors import CheckpointError, UsageError
from shardnet.testing import each_rank, loopback_cluster, same_bits
from shardnet.zero import ZeroOptimizer
from tests.training.workers import PATIENCE_S

RANKS, STEP = 3, 7


class Net(nn.Module):
    """Everything that a state_dict may have: tied and ignored parameters, buffers under two names, and one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        mask = torch.arange(4.0)
        self.register_buffer("mask", mask)
        self.register_buffer("same_mask", mask)
        self.register_buffer("cache", torch.ones(9), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.frozen(self.norm(self.embedding(tokens)))) * self.scale
        return logits


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with two checkpoints, and the state_dict of the last one. The first one is as it was before training."""
    folder = tmp_path_factory.mktemp("looking")

    async def work(backend: Backend) -> dict[str, torch.Tensor]:
        module = net(0)
        async with AsyncFSDP(module, backend, ignored_modules=[module.frozen]) as model:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            checkpoints = Checkpoints(backend, folder, model, optimizer)
            await checkpoints.save(STEP - 1)
            await model.backward((await model(torch.tensor([1, 2, 3]))).square().mean())
            await model.step(optimizer)
            await checkpoints.save(STEP, position=3)
            await checkpoints.wait()
            return await model.full_state_dict()

    async def train() -> dict[str, torch.Tensor]:
        async with loopback_cluster(RANKS) as ranks:
            return (await each_rank(ranks, work))[0]

    return folder, asyncio.run(train())


def test_the_exported_file_is_the_modules_own(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, state = saved
    file = tmp_path / "model.safetensors"
    assert main(["checkpoint", "export", str(folder), str(file)]) == 0
    assert f"{file}: {len(state)} tensors, " in capsys.readouterr().out
    found = load_file(file)
    assert found.keys() == state.keys()
    assert all(same_bits(found[name], value) for name, value in state.items())
    module = net(1)
    module.load_state_dict(found)
    assert module.head.weight is module.embedding.weight


def test_an_earlier_one(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    folder, _ = saved
    for path, options in ((folder, ["--step", str(STEP - 1)]), (folder / f"step-{STEP - 1:08d}", [])):
        assert main(["checkpoint", "export", str(path), str(tmp_path / "model"), *options]) == 0
        found = load_file(tmp_path / "model")
        assert all(same_bits(found[name], value) for name, value in net(0).state_dict().items())


def test_list(saved: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved
    assert main(["checkpoint", "list", str(folder)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["step", "saved", "ranks", "size", "contents"]
    assert [row.split()[0] for row in rows] == [str(STEP), str(STEP - 1)]
    assert re.search(rf" {RANKS}  +\d+\.\d KiB  model, options of AdamW$", rows[0])
    assert main(["checkpoint", "list", "--json", str(folder)]) == 0
    last, _ = json.loads(capsys.readouterr().out)
    assert (last["step"], last["ranks"], last["things"]) == (STEP, RANKS, ["model", "options of AdamW"])
    assert last["path"] == str(folder / f"step-{STEP:08d}")
    files = Path(last["path"]).glob("*.safetensors")
    assert last["bytes"] == sum(path.stat().st_size for path in files)


def test_list_goes_on_behind_one_that_cannot_be_read(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(saved[0], tmp_path / "copy")
    damaged = folder / f"step-{STEP:08d}" / NAME
    damaged.write_bytes(damaged.read_bytes().replace(b"step", b"pets", 1))
    for options in ([], ["--json"]):
        assert main(["checkpoint", "list", *options, str(folder)]) == 1
        said = capsys.readouterr()
        assert said.err == f"shardnet checkpoint: {damaged} cannot be used: its content does not match its checksum\n"
        steps = [each["step"] for each in json.loads(said.out)] if options else [int(row.split()[0]) for row in said.out.splitlines()[1:]]
        assert steps == [STEP - 1]


def test_verify(saved: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert capsys.readouterr().out == "".join(f"{folder}/step-{step:08d}: whole ({RANKS} files)\n" for step in (STEP, STEP - 1))
    broken = folder / f"step-{STEP:08d}" / "rank-00001-of-00003.safetensors"
    whole = broken.read_bytes()
    try:
        broken.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert main(["checkpoint", "verify", str(folder)]) == 1
        said = capsys.readouterr()
        assert said.out.splitlines()[0] == f"{broken.parent}: broken"
        assert said.err.startswith(f"shardnet checkpoint: {broken} cannot be used: the bytes of ")
        assert said.err.count("\n") == 1
        assert main(["checkpoint", "verify", str(folder), "--step", str(STEP - 1)]) == 0
        broken.unlink()
        assert main(["checkpoint", "verify", str(folder)]) == 1
        assert f"{broken} cannot be used: " in capsys.readouterr().err
    finally:
        broken.write_bytes(whole)


def test_verify_looks_for_what_the_manifest_names(saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """In the files, too: two of them have changed places in the manifest."""
    folder = shutil.copytree(saved[0], tmp_path / "copy") / f"step-{STEP:08d}"
    manifest = Manifest.read(folder)
    first, second, *others = manifest.spans
    replace(manifest, spans=(second, first, *others)).write(folder)
    of_manifest, *of_files = problems(folder)
    assert of_manifest is None
    assert [problem is None or "which the manifest lists for it" in problem for problem in of_files] == [True] * RANKS
    assert sum(problem is not None for problem in of_files) == 2


async def test_all_weights_are_exported_though_forward_had_some_when_the_files_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tensors than the module's own are in it then."""
    entered, written = threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.set()
            assert written.wait(PATIENCE_S)
            return super().forward(x)

    async def work(backend: Backend) -> None:
        async with AsyncFSDP(nn.Sequential(Slow(4, 4), nn.Linear(4, 4)), backend, units=[nn.Linear]) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            write = checkpoints._write_file

            def write_during_forward(checkpoint: str) -> Any:
                assert entered.wait(PATIENCE_S)
                return write(checkpoint)

            monkeypatch.setattr(checkpoints, "_write_file", write_during_forward)
            await checkpoints.save(1)
            forward = asyncio.create_task(model(torch.ones(2, 4)))
            await checkpoints.wait()
            written.set()
            await forward

    async with loopback_cluster(2) as ranks:
        await each_rank(ranks, work)
    assert sorted(whole_weights(tmp_path / "step-00000001")) == ["0.bias", "0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["list", "{folder}/none"], 1, "none is not a folder"),
        (["verify", "{empty}"], 1, "has no checkpoints"),
        (["verify", "{folder}", "--step", "3"], 2, f"has no checkpoint of step 3; choose one of {STEP}, {STEP - 1}"),
        (["verify", f"{{folder}}/step-{STEP:08d}", "--step", str(STEP)], 2, f"step-{STEP:08d} is one checkpoint; leave --step out"),
        (["export", f"{{folder}}/step-{STEP:08d}", "{empty}/model", "--step", "3"], 2, "is one checkpoint; leave --step out"),
        (["export", "{folder}", "{empty}/model", "--model", "1"], 2, "has 1 module; there is no number 1"),
        (["export", "{folder}", "{empty}/no/model"], 1, "No such file or directory"),
        (["export", "{folder}", "{empty}"], 2, "is not a regular file, so no weights are written to it"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    status: int,
    words: str,
    saved: tuple[Path, dict[str, torch.Tensor]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [each.format(folder=saved[0], empty=tmp_path) for each in arguments]
    assert main(["checkpoint", *filled]) == status
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


async def test_modules_of_zero_optimizers(tmp_path: Path) -> None:
    def step(backend: Backend, module: Net) -> ZeroOptimizer:
        optimizer = ZeroOptimizer(module.parameters(), torch.optim.Adam, backend, module=module, lr=0.1)
        module(torch.tensor([1, 2, 3])).square().mean().backward()
        optimizer.step()
        optimizer.wait()
        return optimizer

    async def work(backend: Backend) -> list[dict[str, torch.Tensor]]:
        module, other = net(backend.rank), net(9)
        optimizer = await asyncio.to_thread(step, backend, module)
        checkpoints = Checkpoints(backend, tmp_path, optimizer, module, other)
        await checkpoints.save(1)
        await checkpoints.wait()
        return [{name: value.clone() for name, value in each.state_dict().items()} for each in (module, other)]

    async with loopback_cluster(RANKS) as ranks:
        (module, other), *_ = await each_rank(ranks, work)
    path = tmp_path / "step-00000001"
    with pytest.raises(UsageError, match="has 2 modules, say which: --model 0 is the first"):
        whole_weights(path)
    with pytest.raises(UsageError, match="has 2 modules; there is no number -1"):
        whole_weights(path, -1)
    for number, state in enumerate((module, other)):
        found = whole_weights(path, number)
        assert found.keys() == state.keys()
        assert all(same_bits(found[name], value) for name, value in state.items())


async def test_a_checkpoint_without_a_module(tmp_path: Path) -> None:
    class Counter:
        def state_dict(self) -> dict[str, int]:
            return {"count": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            """Not called: nothing is loaded."""

    async def work(backend: Backend) -> None:
        checkpoints = Checkpoints(backend, tmp_path, Counter())
        await checkpoints.save(1)
        await checkpoints.wait()

    async with loopback_cluster(1) as ranks:
        await each_rank(ranks, work)
    with pytest.raises(UsageError, match="step-00000001 has no module, so there are no weights to export"):
        whole_weights(tmp_path / "step-00000001")


async def test_a_checkpoint_that_lacks_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(backend: Backend) -> None:
        async with AsyncFSDP(net(0), backend) as model:
            checkpoints = Checkpoints(backend, tmp_path, model)
            await checkpoints.save(1)
            await checkpoints.wait()

    async with loopback_cluster(2) as ranks:
        await each_rank(ranks, work)
    holders = Manifest.holders
    monkeypatch.setattr(Manifest, "holders", lambda manifest: {name: held[1:] for name, held in holders(manifest).items()})
    with pytest.raises(CheckpointError, match=r"step-00000001 lacks a part of 0/"):
        whole_weights(tmp_path / "step-00000001")
