"""`forked`: ranks forked from this process, with everything imported."""

import multiprocessing
from collections.abc import Callable


def forked(ranks: int, work: Callable[[int], object]) -> int:
    """Call `work(rank)` in that many processes; return how many failed. This process must have no other thread running."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    return sum(process.exitcode != 0 for process in processes)
