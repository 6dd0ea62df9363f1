"""Counting what this process has mapped of the memory that a node's ranks have in common."""

import gc
from collections.abc import Callable
from pathlib import Path

NAME = "memfd:shardnet-segment"


def mappings() -> list[str]:
    """All of this process."""
    return Path("/proc/self/maps").read_text().splitlines()


def since_now() -> Callable[[], int]:
    """How many mappings there are more than now, of all ranks in this process: two a slot and rank."""

    def mapped() -> int:
        gc.collect()
        return sum(NAME in line for line in mappings())

    before = mapped()
    return lambda: mapped() - before
