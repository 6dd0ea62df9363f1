"""The examples for torchrun, Slurm and ssh in docs/schedulers.md work as they stand there. Kubernetes: tests/docker/test_kubernetes.py."""

import asyncio
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from shardnet.cli.main import parse
from shardnet.scheduler import INDEXED_JOB, OPEN_MPI, PMI, SLURM, TORCHRUN
from shardnet.settings import Settings
from tests.docs.page import PAGE, ROOT, block, commands
from tests.training.scheduled import allocation, without_schedulers
from tests.training.workers import rendezvous

# For a scheduler it does what any training does.
PROGRAM = """\
import os, shardnet, torch
async def main():
    async with shardnet.connect() as cluster:
        total = await cluster.backend.all_reduce(torch.tensor([cluster.rank + 1.0]))
        line = f"rank {cluster.rank} of {cluster.world_size}, wished {os.environ['RANK']}: {total.item()}\\n"
        os.write(1, line.encode())  # in one piece: others write there, too
shardnet.run(main)
"""
# The same without torch: it only joins.
JOINER = """\
import asyncio, os
from shardnet.credentials import Role, Security
from shardnet.rendezvous.client import join
from shardnet.rendezvous.request import JoinRequest
async def main():
    known = {name.removeprefix("SHARDNET_").lower(): value for name, value in os.environ.items()}
    size, wish = int(known["world_size"]), int(known["wished_rank"])
    address, local = f"127.0.0.1:{1 + wish}", int(known["local_rank"])
    request = JoinRequest(known["job"], f"w{wish}", address, known["node"], size, size, local, elastic=True, wished_rank=wish)
    security = Security.find(Role.WORKER, token=known["token"])
    async with join(known["rendezvous"], request, security=security) as membership:
        print(f"rank {membership.topology.rank} of {membership.topology.world_size}, wished {wish}")
asyncio.run(main())
"""


async def run(folder: Path, *command: str, environment: Mapping[str, str]) -> str:
    """Run a command, which must succeed; return its output."""
    environment = without_schedulers(os.environ) | {"PYTHONPATH": str(ROOT)} | dict(environment)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=folder, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    return output


def stand_in(folder: Path, name: str, *command: str) -> None:
    path = folder / name
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


@pytest.mark.timeout(180)  # starts fresh interpreters, maybe on a slow machine
async def test_torchrun(tmp_path: Path) -> None:
    (line,) = [line for line in block("torchrun", "console").splitlines() if "torchrun" in line]
    match = re.fullmatch(r"\$ SHARDNET_RENDEZVOUS=\S+ torchrun (.*)", line)
    assert match is not None
    (tmp_path / "train.py").write_text(PROGRAM)
    with rendezvous() as address:
        command = (sys.executable, "-m", "torch.distributed.run", *match.group(1).split())
        output = await run(tmp_path, *command, environment={"SHARDNET_RENDEZVOUS": address, "OMP_NUM_THREADS": "1"})
    assert sorted(re.findall(r"rank .*", output)) == ["rank 0 of 2, wished 0: 3.0", "rank 1 of 2, wished 1: 3.0"]


@pytest.mark.timeout(180)
async def test_slurm(tmp_path: Path) -> None:
    """The batch script, on two nodes that are this machine."""
    (tmp_path / "train.py").write_text(JOINER)
    (tmp_path / "job.sh").write_text(block("Slurm", "bash"))
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path / "bin", "shardnet", sys.executable, "-m", "shardnet.cli")
    stand_in(tmp_path / "bin", "srun", sys.executable, "-m", "tests.docs.srun")
    stand_in(tmp_path / "bin", "hostname", "echo", "127.0.0.1")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    job = allocation(tasks=2, nodes=2) | {"SLURM_JOB_ID": str(os.getpid()), "WORKERS": "1"}  # a port of this test's own
    output = await run(tmp_path, "bash", "job.sh", environment=job | {"PATH": path})
    assert sorted(re.findall(r"rank . of ., wished .", output)) == ["rank 0 of 2, wished 0", "rank 1 of 2, wished 1"]
    assert "rendezvous: closed" in output


def test_what_is_typed_in_is_understood() -> None:
    """Every command of ours and of torchrun's is understood, whatever command starts it."""
    seen = []
    for line in commands():
        words = re.sub(r"[A-Z_]+=\S+ ", "", line.removesuffix(" &")).replace('"$SLURM_NNODES"', "2").replace('"${WORKERS:-4}"', "4")
        words = words.replace("$address", "node:7000").replace("${address##*:}", "7000")
        ours = re.search(r"(?<![-/$(\w])(shardnet|torchrun) ([a-z-].*)", words)
        if ours is None:
            continue
        seen.append(ours.group(1))
        arguments = shlex.split(ours.group(2))
        if ours.group(1) == "torchrun":
            assert get_args_parser().parse_args(arguments).training_script == "train.py"
        else:
            assert parse(arguments).command == arguments[0]
    assert (seen.count("shardnet"), seen.count("torchrun")) == (10, 2), seen


def test_the_table_has_what_is_read() -> None:
    rows = [set(re.findall(r"`([A-Z_]+)`", row)) for row in re.findall(r"^\| .*", PAGE, re.MULTILINE) if "SHARDNET_" not in row][2:]
    read = [{each.rank, each.world_size, each.local_rank, *each.job} - {""} for each in (TORCHRUN, OPEN_MPI, PMI, SLURM, INDEXED_JOB)]
    assert rows == read


def test_settings_that_are_listed_are_there() -> None:
    listed = {name for row in re.findall(r"^\| `SHARDNET_.*", PAGE, re.MULTILINE) for name in re.findall(r"`SHARDNET_([A-Z_]+)`", row)}
    assert len(listed) > 10
    assert {name.lower() for name in listed - {"TOKEN_FILE"}} <= {each.name for each in fields(Settings)}
