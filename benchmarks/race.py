"""Taking the time of several engines in turn, so that whatever else the machine does meets all of them alike."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.row import Timing

WARM_UP_ROUNDS = 2  # the first run opens connections and faults pages in


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine at one task. `run` is timed; `prepare`, before it, is not.

    Of several `calls`, one after the other, the mean counts, and `prepare` with it: one alone would rather show how far ranks
    are apart when they leave the barrier.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    calls: int = 1


def race(contenders: Sequence[Contender], rounds: int, on_round: Callable[[int], None] = lambda done: None) -> list[Timing]:
    """Let every contender run once a round; the timings in the contenders' order, equal on all ranks. A collective.

    `on_round(done)` is called after each round that counts. The barriers are gloo's for all contenders.
    """
    wall_s = torch.zeros(len(contenders), rounds, dtype=torch.float64)
    cpu_s = torch.zeros_like(wall_s)
    for number in range(-WARM_UP_ROUNDS, rounds):
        for lane, contender in enumerate(contenders):
            wall, cpu = _time(contender)
            if number >= 0:
                wall_s[lane, number], cpu_s[lane, number] = wall, cpu
        if number >= 0:
            on_round(number + 1)
    dist.all_reduce(wall_s, op=dist.ReduceOp.MAX)  # a collective is over when the last rank has its result
    dist.all_reduce(cpu_s, op=dist.ReduceOp.SUM)
    return [Timing(tuple(wall.tolist()), cpu.mean().item()) for wall, cpu in zip(wall_s, cpu_s, strict=True)]


def _time(contender: Contender) -> tuple[float, float]:
    """Wall and CPU seconds of one run on this rank."""
    contender.prepare()
    dist.barrier()
    cpu_start, start = time.process_time(), time.perf_counter()
    contender.run()
    for _ in range(contender.calls - 1):
        contender.prepare()
        contender.run()
    wall = time.perf_counter() - start
    dist.barrier()  # before the CPU time is read: what an engine still does behind its result, for other ranks, is its cost, too
    return wall / contender.calls, (time.process_time() - cpu_start) / contender.calls
