"""Training programs on ranks that are forked from a process that has imported torch: for tests that do not need the launcher itself.

A rank gets the command line and the environment that `shardnet run` or torchrun would give it. But neither of these starts and watches
it, because their fresh interpreters take seconds to import torch.
"""

import os
import runpy
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from shardnet.cli.launch.environment import worker_environment
from shardnet.cli.launch.job import Job
from shardnet.cli.main import parse
from tests.training.forked import forked
from tests.training.workers import Nursery, rendezvous


def run_program(nursery: Nursery, folder: Path, *command: str, within_s: float = 80.0) -> str:
    """Run the ranks that `shardnet COMMAND` would start in a folder; return what they print. All must succeed."""
    with rendezvous() as address:
        return nursery.call("tests.training.programs:main", address, str(folder), *command, within_s=within_s)


def run_under_torchrun(nursery: Nursery, folder: Path, ranks: int, script: str, within_s: float = 80.0) -> str:
    """Run ranks as `torchrun --standalone --nproc-per-node RANKS SCRIPT` starts them in a folder; return their output. All must succeed."""
    return nursery.call("tests.training.programs:as_torchrun", str(folder), str(ranks), script, within_s=within_s)


def main(rendezvous: str, folder: str, *command: str) -> int:
    """Returns how many ranks failed."""
    options = parse(command)
    sizes = {"nproc": options.nproc, "min_workers": options.min_workers, "restarts": options.restarts}
    job = Job(options.script, tuple(options.args), options.module, **sizes)
    return _fork(folder, job, [worker_environment(job, number, rendezvous) for number in range(job.nproc)])


def as_torchrun(folder: str, ranks: str, script: str) -> int:
    """Returns how many ranks failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    each = [meeting | {"RANK": str(number), "LOCAL_RANK": str(number)} for number in range(int(ranks))]
    return _fork(folder, Job(script, (), False, nproc=int(ranks)), each)


def _fork(folder: str, job: Job, environments: list[dict[str, str]]) -> int:
    """Run a job's program once in each environment; returns how many failed."""
    os.chdir(folder)
    return forked(len(environments), lambda number: _run_rank(job, environments[number]))


def _run_rank(job: Job, environment: Mapping[str, str]) -> None:
    os.environ |= environment
    sys.argv = [job.target, *job.arguments]
    if job.is_module:
        runpy.run_module(job.target, run_name="__main__")
    else:
        sys.path.insert(0, str(Path(job.target).parent))  # as Python does if the program is a file
        runpy.run_path(job.target, run_name="__main__")
