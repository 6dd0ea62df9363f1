"""The tests of conformance.py on ranks that are forked from a process that has imported torch."""

import os
import sys

from tests.interop.conformance import WORLD_SIZE, environment_in, run_rank
from tests.training.forked import forked


def main(folder: str, *names: str) -> int:
    """Run the tests whose names contain one of these; return how many ranks failed."""
    os.environ |= environment_in(folder)

    def work(rank: int) -> None:
        os.environ["RANK"] = str(rank)
        sys.exit(run_rank(rank, list(names)))

    return forked(WORLD_SIZE, work)
