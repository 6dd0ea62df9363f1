"""Training programs on ranks that are forked from a process that has imported torch: for tests that do not need the launcher itself.

A rank gets the command line and the environment that `shardnet run` would give it; what starts and watches it is not that command, whose
fresh interpreters take seconds to import torch.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from shardnet.cli.launch.environment import worker_environment
from shardnet.cli.launch.job import Job
from shardnet.cli.main import parse
from tests.training.workers import Nursery, rendezvous


def run_program(nursery: Nursery, folder: Path, *command: str, within_s: float = 80.0) -> str:
    """What the ranks print that `shardnet COMMAND` would start in a folder; all must end well."""
    with rendezvous() as address:
        return nursery.call("tests.training.programs:main", address, str(folder), *command, within_s=within_s)


def main(rendezvous: str, folder: str, *command: str) -> int:
    """Returns how many ranks failed."""
    os.chdir(folder)
    options = parse(command)
    sizes = {"nproc": options.nproc, "min_workers": options.min_workers, "restarts": options.restarts}
    job = Job(options.script, tuple(options.args), options.module, **sizes)
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(job, number, rendezvous), daemon=True) for number in range(job.nproc)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)


def run_rank(job: Job, number: int, rendezvous: str) -> None:
    os.environ |= worker_environment(job, number, rendezvous)
    sys.argv = [job.target, *job.arguments]
    if job.is_module:
        runpy.run_module(job.target, run_name="__main__")
    else:
        sys.path.insert(0, str(Path(job.target).parent))  # as Python does where the program is a file
        runpy.run_path(job.target, run_name="__main__")
