"""workers/train_lm.py on two ranks that are forked from a process that has imported torch: for tests that do not need the launcher."""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "workers/train_lm.py"
RANKS = 2


def run_rank(number: int, rendezvous: str, options: tuple[str, ...]) -> None:
    os.environ |= {"SHARDNET_RENDEZVOUS": rendezvous, "SHARDNET_WORLD_SIZE": str(RANKS), "SHARDNET_LOCAL_RANK": str(number)}
    program = ROOT / PROGRAM
    sys.argv = [PROGRAM, *options]
    sys.path.insert(0, str(program.parent))  # as Python does where the program is a file
    runpy.run_path(str(program), run_name="__main__")


def main(rendezvous: str, *options: str) -> int:
    """Returns how many ranks failed."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(number, rendezvous, options), daemon=True) for number in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return sum(process.exitcode != 0 for process in ranks)
