"""The examples in the README and the pages work as they stand there.

The README's program is started as a user would start it. The pages' programs run with the command lines that stand there, but without the
launcher, which tests/cli tests.
"""

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import shardnet
from shardnet import elastic
from shardnet.cli.main import main
from shardnet.credentials.folder import load
from shardnet.topology import Member, Topology
from tests.fsdp.ranks import run_ranks
from tests.training.programs import run_program
from tests.training.workers import Nursery

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.timeout(180)  # starts two fresh interpreters, maybe on a slow machine
async def test_training_program(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert program is not None
    script = tmp_path / "train.py"
    script.write_text(program.group(1))
    command = (sys.executable, "-m", "shardnet.cli", "run", "--nproc", "2", str(script))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    losses = {int(rank): float(loss) for rank, loss in re.findall(r"rank (\d) of 2: loss ([\d.]+)", output)}
    assert losses.keys() == {0, 1}, output
    assert max(losses.values()) < 0.2, output  # untrained it is about 1


def test_the_optimizer_alone() -> None:
    """The function in the README's passage on ZeRO-1, on two ranks of this process."""
    (program,) = re.findall(r"```python\n(from shardnet.zero import .*?)```", README.read_text(), re.DOTALL)
    lines: list[str] = []
    names: dict[str, Any] = {"shardnet": shardnet, "torch": torch, "nn": nn, "F": F, "print": lines.append}
    exec(program, names)
    members = tuple(Member(rank, rank, 0, f"memory:{rank}", "here", f"worker{rank}") for rank in range(2))
    run_ranks(2, lambda backend: names["train"](shardnet.Cluster(backend, Topology(1, backend.rank, members))))
    found = {
        int(rank): (float(loss), int(kept)) for rank, loss, kept in re.findall(r"rank (\d): loss ([\d.]+), (\d) entries", "\n".join(lines))
    }
    assert {rank: kept for rank, (_, kept) in found.items()} == {0: 2, 1: 0}
    assert all(loss < 0.5 for loss, _ in found.values()), lines  # untrained it is about 1


async def test_the_elastic_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains in a world of one, as any program does; tests/elastic has larger worlds."""
    program = _elastic_program().partition("if __name__")[0]
    lines: list[str] = []
    names: dict[str, Any] = {"shardnet": shardnet, "torch": torch, "nn": nn, "F": F, "print": lines.append}
    exec(program, names)
    monkeypatch.delenv("SHARDNET_RENDEZVOUS", raising=False)
    await elastic.run(names["train"])
    assert re.fullmatch(r"rank 0 of 1: loss 0\.\d+", lines[0])


@pytest.mark.timeout(180)  # six fresh interpreters
async def test_the_elastic_program_in_a_test_of_its_own(tmp_path: Path) -> None:
    (test,) = re.findall(r"```python\n(from shardnet.testing import .*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(_elastic_program())
    (tmp_path / "test_train.py").write_text(test)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "test_train.py")
    process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    output = (await process.communicate())[0].decode()
    assert "1 passed" in output, output


def _elastic_program() -> str:
    (program,) = (each for each in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "import elastic" in each)
    return str(program)


@pytest.mark.timeout(180)  # the nursery may have to start first, maybe on a slow machine
def test_the_program_of_the_page_on_workers_that_come_and_go(nursery: Nursery, tmp_path: Path) -> None:
    page = (README.parent / "docs" / "elastic.md").read_text()
    program = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    command = re.search(r"^\$ \.venv/bin/shardnet (run .* train\.py)$", page, re.MULTILINE)
    assert program is not None
    assert command is not None
    (tmp_path / "train.py").write_text(program.group(1))
    output = run_program(nursery, tmp_path, *command.group(1).split())
    assert len(re.findall(r"rank \d of [23]: 200 steps", output)) in (2, 3), output  # the third may have come late


@pytest.mark.timeout(240)  # three runs
def test_the_programs_of_the_page_on_checkpoints(nursery: Nursery, tmp_path: Path) -> None:
    page = (README.parent / "docs" / "checkpoints.md").read_text()
    elastic_program, by_hand = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(elastic_program)
    (tmp_path / "by_hand.py").write_text(by_hand)
    commands = (*re.findall(r"^\$ \.venv/bin/shardnet (run .*)$", page, re.MULTILINE), "run --nproc 2 by_hand.py")
    outputs = [run_program(nursery, tmp_path, *command.split()) for command in commands]
    assert len(outputs) == 3
    assert "it goes on behind step" not in outputs[0]
    assert "it goes on behind step 200" in outputs[1], outputs
    shown = re.findall(r"^(runs/first/step-\d+)/|^ +(rank-\S+)", page, re.MULTILINE)
    folder = tmp_path / shown[0][0]
    assert {path.name for path in folder.iterdir()} == {"manifest.json", *(name for _, name in shown[1:])}
    assert set(load_file(tmp_path / "model.safetensors")) == {"weight", "bias"}


async def test_the_program_of_the_page_on_metrics(tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", (README.parent / "docs" / "metrics.md").read_text(), re.DOTALL)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output = (await process.communicate())[0].decode()
    assert output.splitlines() == [f"{step} {{'loss': {1 / step}, 'learning_rate': 0.001}}" for step in (1, 2, 3)]
    lines = (tmp_path / "runs/first/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_certificates_as_the_readme_makes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ \.venv/bin/shardnet (certs .*)$", README.read_text(), re.MULTILINE)
    assert [main(command.split()) for command in commands] == [0, 0, 0, 0]
    made = {path.name: str(load(path).identity) for path in Path("cluster").iterdir() if path.is_dir()}
    assert made == {
        "rendezvous": "rendezvous 'rendezvous'",
        "left": "worker 'left' of job 'lm'",
        "right": "worker 'right' of job 'lm'",
        "me": "operator 'me'",
    }


@pytest.mark.parametrize("page", [README, *sorted(README.parent.glob("docs/**/*.md"))], ids=lambda page: page.name)
def test_files_named_in_the_docs_exist(page: Path) -> None:
    for name in re.findall(r"`((?:shardnet|workers|docs|benchmarks|docker|protos|tests)/[\w./-]+)`", page.read_text()):
        assert (README.parent / name).exists(), name
