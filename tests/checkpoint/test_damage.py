"""Damaged files: they never load wrongly, and never cost more than one interval."""

import asyncio
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from crc32c import crc32c
from safetensors.torch import load_file, save_file

from shardnet import AsyncFSDP
from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints, read_weights, write_weights
from shardnet.checkpoint.folder import Folder
from shardnet.errors import CheckpointError, UsageError
from shardnet.testing import each_error, each_rank, loopback_cluster, same_bits
from tests.checkpoint.training import Training
from tests.fsdp.models import Block

RANKS = 2
POSITIONS = 123_457
SEED = 20_261_122


def module_at(step: int) -> torch.nn.Module:
    """Another one at each step, the same on all ranks."""
    return Training.module(step)


async def write(folder: Path, *steps: int) -> None:
    async def work(backend: Backend) -> None:
        for step in steps:
            async with AsyncFSDP(module_at(step), backend, units=[Block]) as model:
                checkpoints = Checkpoints(backend, folder, model)
                await checkpoints.save(step, position=step * POSITIONS)
                await checkpoints.wait()

    async with loopback_cluster(RANKS) as ranks:
        await each_rank(ranks, work)


async def found_by(backend: Backend, folder: Path) -> int | None:
    """The step that is loaded, if it is all there and right."""
    async with AsyncFSDP(module_at(0), backend, units=[Block]) as model:
        found = await Checkpoints(backend, folder, model).load()
        if found is None:
            return None
        wanted = module_at(found.step).state_dict()
        state = await model.full_state_dict()
        assert all(same_bits(state[name], value) for name, value in wanted.items()), "a wrong load"
        assert found.values == {"position": found.step * POSITIONS}, "a wrong load"
        return found.step


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2, for others to copy."""
    folder = tmp_path_factory.mktemp("written") / "run"
    asyncio.run(write(folder, 1, 2))
    return folder


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def _file(run: Path, step: int, rank: int) -> Path:
    return Folder(run, 2).of(step) / f"rank-{rank:05d}-of-{RANKS:05d}.safetensors"


def _swap(one: Path, other: Path) -> None:
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _cut(path: Path, size: int) -> None:
    os.truncate(path, size)


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def _another_digit(path: Path) -> None:
    """Change a digit of one of the program's own values, which is only in the header."""
    content = path.read_bytes()
    assert content.count(b"%d" % (2 * POSITIONS)) == 1
    path.write_bytes(content.replace(b"%d" % (2 * POSITIONS), b"%d" % (2 * POSITIONS + 1)))


def _other_content(path: Path) -> None:
    """A valid file that any reader accepts, with the same tensors but other values."""
    save_file({name: torch.zeros_like(value) for name, value in load_file(path).items()}, path)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a shard is missing": (lambda run: _file(run, 2, 1).unlink(), "No such file"),
    "a shard is empty": (lambda run: _cut(_file(run, 2, 0), 0), "it has 0 bytes, expected "),
    "a shard is cut off": (lambda run: _cut(_file(run, 2, 0), 1000), "it has 1000 bytes, expected "),
    "a shard is longer": (lambda run: _append(_file(run, 2, 1)), "bytes, expected "),
    "shards of two ranks are swapped": (lambda run: _swap(_file(run, 2, 0), _file(run, 2, 1)), "cannot be used"),
    "shards of two checkpoints are swapped": (lambda run: _swap(_file(run, 2, 0), _file(run, 1, 0)), "cannot be used"),
    "a shard has another digit": (lambda run: _another_digit(_file(run, 2, 0)), "its header is not the one that was written"),
    "a shard has other values": (lambda run: _other_content(_file(run, 2, 0)), "cannot be used"),
    "the manifest is missing": (lambda run: (Folder(run, 2).of(2) / "manifest.json").unlink(), ""),
    "the manifest is empty": (lambda run: _cut(Folder(run, 2).of(2) / "manifest.json", 0), "manifest.json cannot be used"),
    "the manifest is cut off": (lambda run: _cut(Folder(run, 2).of(2) / "manifest.json", 300), "its content does not match its checksum"),
    "the manifest is of another checkpoint": (
        lambda run: _swap(Folder(run, 2).of(1) / "manifest.json", Folder(run, 2).of(2) / "manifest.json"),
        "cannot be used",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
async def test_the_checkpoint_before_is_taken(damage: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    spoil, why = DAMAGES[damage]
    spoil(run)
    both = ("swapped" in damage and "checkpoints" in damage) or "of another checkpoint" in damage
    async with loopback_cluster(RANKS) as ranks:
        if both:
            for error in await each_error(ranks, lambda rank: found_by(rank, run)):
                assert isinstance(error, CheckpointError)
                assert "none of the checkpoints in" in str(error)
        else:
            assert await each_rank(ranks, lambda rank: found_by(rank, run)) == [1, 1]
    assert not why or ("the checkpoint of step 2 is skipped: rank " in caplog.text and why in caplog.text)


def _reseal(path: Path, edit: Callable[[Any], object]) -> None:
    """Edit a manifest, and give it the right checksum."""
    found = json.loads(path.read_bytes().split(b"\n", 1)[1])
    edit(found)
    body = json.dumps(found).encode()
    path.write_bytes(b'{"crc32c": %d}\n%s\n' % (crc32c(body), body))


EDITS: dict[str, tuple[Callable[[Any], object], str]] = {
    "an id that is none": (lambda found: found.update(id=3), "id"),
    "a step in words": (lambda found: found.update(step="two"), "step"),
    "a negative step": (lambda found: found.update(step=-2), "step"),
    "a size that is no count": (lambda found: found["sizes"].update({"0/more": 0.5}), "sizes"),
    "no files": (lambda found: found.update(files=[]), "files"),
    "a file elsewhere": (lambda found: found["files"][1].update(name="/etc/passwd"), "files"),
    "a file of another checkpoint": (
        lambda found: found["files"][1].update(name=f"../step-00000001/{found['files'][1]['name']}"),
        "files",
    ),
    "a span of an unknown parameter": (lambda found: found["spans"][0][0].__setitem__(0, "0/none"), "spans"),
    "a span of a list": (lambda found: found["spans"][0][0].__setitem__(0, ["0/none"]), "spans"),
    "a span that begins before its parameter": (lambda found: found["spans"][0][0].__setitem__(1, -5), "spans"),
    "a span that ends behind its parameter": (lambda found: found["spans"][0][0].__setitem__(2, 10**15), "spans"),
    "spans of more files than there are": (lambda found: found["spans"].append([]), "spans"),
    "a shape of another size": (lambda found: found["modules"][0][0][1].__setitem__(1, [5, 7]), "modules"),
    "a dtype that is none": (lambda found: found["modules"][0][0][1].__setitem__(2, "load"), "modules"),
}


@pytest.mark.parametrize("edited", EDITS)
async def test_a_manifest_that_somebody_has_edited(edited: str, run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the right checksum: it is not taken, as one that is damaged."""
    edit, of = EDITS[edited]
    _reseal(Folder(run, 2).of(2) / "manifest.json", edit)
    async with loopback_cluster(RANKS) as ranks:
        assert await each_rank(ranks, lambda rank: found_by(rank, run)) == [1, 1]
    assert f"manifest.json cannot be used: its entry '{of}' is not valid" in caplog.text


@pytest.mark.parametrize("repeats", [60, pytest.param(2000, marks=pytest.mark.faults)])
async def test_a_flipped_bit_anywhere(repeats: int, run: Path, written: Path) -> None:
    """It is found, or it is where nobody reads: between two lines, or in data that no rank needs."""
    rng = random.Random(SEED)
    files = sorted(Folder(run, 2).of(2).iterdir())
    found = []
    async with loopback_cluster(RANKS) as ranks:
        for _ in range(repeats):
            path = rng.choice(files)
            content = bytearray(path.read_bytes())
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
            found += await each_rank(ranks, lambda rank: found_by(rank, run))  # which looks at what it got
            shutil.copy(written / path.parent.name / path.name, path)
    assert found.count(1) > 0.9 * len(found)
    assert found.count(1) + found.count(2) == len(found)


async def test_none_is_whole(run: Path) -> None:
    """Nobody starts again from the beginning without being asked to."""
    for step in (1, 2):
        _cut(_file(run, step, 0), 100)
    async with loopback_cluster(RANKS) as ranks:
        for error in await each_error(ranks, lambda rank: found_by(rank, run)):
            assert isinstance(error, CheckpointError)
            assert str(error).startswith(f"none of the checkpoints in {run} can be used; problem of the oldest: rank ")


async def test_a_newer_format_is_said_so(run: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardnet.checkpoint.manifest._FORMAT", 2)
    await write(run, 3)
    monkeypatch.undo()
    async with loopback_cluster(RANKS) as ranks:
        assert await each_rank(ranks, lambda rank: found_by(rank, run)) == [2, 2]
    assert "has format 2, but this shardnet reads format 1" in caplog.text


# --- a disk that is full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk with room for two and a half checkpoints."""
    where = tmp_path / "disk"
    where.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", where], check=False, timeout=10).returncode:
        pytest.skip("this user may not mount a file system of its own")
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True, timeout=10)


async def test_a_full_disk(small_disk: Path) -> None:
    """The save fails on all ranks and leaves nothing, and the checkpoint before is found."""

    async def work(backend: Backend) -> int:
        async with AsyncFSDP(module_at(1), backend, units=[Block]) as model:
            checkpoints, done = Checkpoints(backend, small_disk, model, keep=9), []

            async def fill() -> None:
                for step in range(1, 20):
                    await checkpoints.save(step)
                    await checkpoints.wait()
                    done.append(step)

            with pytest.raises(CheckpointError, match="No space left on device"):
                await fill()
            return len(done)

    async def load(backend: Backend) -> int:
        async with AsyncFSDP(module_at(0), backend, units=[Block]) as model:
            found = await Checkpoints(backend, small_disk, model).load()
            assert found is not None
            return found.step

    async with loopback_cluster(RANKS) as ranks:
        last = await each_rank(ranks, work)
        assert await each_rank(ranks, load) == last
    assert last[0] > 0
    assert sorted(path.name for path in small_disk.iterdir()) == [f"step-{step:08d}" for step in range(1, last[0] + 1)]  # noqa: ASYNC240


# --- one file for others


async def test_weights_for_others_and_back(tmp_path: Path) -> None:
    """Names, shapes, tied parameters; a plain module takes them strictly, and so does a sharded one of any world size."""
    path = tmp_path / "model.safetensors"

    async def save(backend: Backend) -> None:
        async with AsyncFSDP(module_at(5), backend, units=[Block]) as model:
            state = await model.full_state_dict(rank0_only=True)
            if backend.rank == 0:
                write_weights(path, state)

    async def load(backend: Backend) -> None:
        async with AsyncFSDP(module_at(0), backend, units=[Block]) as model:
            await model.load_full_state_dict(read_weights(path))
            state = await model.full_state_dict()
            assert all(same_bits(state[name], value) for name, value in module_at(5).state_dict().items())

    async with loopback_cluster(2) as ranks:
        await each_rank(ranks, save)
    plain = module_at(0)
    plain.load_state_dict(load_file(path))
    assert all(same_bits(value, plain.state_dict()[name]) for name, value in module_at(5).state_dict().items())
    async with loopback_cluster(3) as ranks:
        await each_rank(ranks, load)
    assert [each.name for each in tmp_path.iterdir()] == ["model.safetensors"]  # noqa: ASYNC240


def test_weights_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no weights")
    for name in ("text", "none"):
        with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
            next(read_weights(tmp_path / name))
    for folder, problem in (("none", "No such file or directory"), ("text", "Not a directory")):  # the file that was asked for is named
        with pytest.raises(OSError, match=rf"{problem}: '{tmp_path}/{folder}/model\.safetensors'$"):
            write_weights(tmp_path / folder / "model.safetensors", {"a": torch.ones(2)})


def test_weights_replace_nothing_but_files(tmp_path: Path) -> None:
    """Such as a device, of which a pipe is the harmless kind. A link stays one."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link to pipe").symlink_to(tmp_path / "pipe")
    for name in ("folder", "pipe", "link to pipe"):
        with pytest.raises(UsageError, match=f"{name} is not a regular file"):
            write_weights(tmp_path / name, {"a": torch.ones(2)})
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "folder" / "old").write_text("no weights")
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "old")
    write_weights(tmp_path / "link", {"a": torch.ones(2)})
    assert (tmp_path / "link").is_symlink()
    assert load_file(tmp_path / "folder" / "old")["a"].tolist() == [1, 1]
    assert {path.name for path in tmp_path.iterdir()} == {"folder", "pipe", "link to pipe", "link"}


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_a_file_of_weights_may_be_read_by_whom_the_umask_lets(tmp_path: Path, umask: int, mode: int) -> None:
    """safetensors itself makes the file readable only for its owner, so others could not load weights that were exported for them."""
    before = os.umask(umask)
    try:
        write_weights(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    finally:
        os.umask(before)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == mode
