"""Timing several engines in turn, so that whatever else the machine does affects all of them alike."""

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
    """One engine at one task. `prepare` runs once before each timed run and is not timed. `run` is called `calls` times in a row, and the
    mean counts: a single call would rather show how far apart the ranks leave the barrier.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    calls: int = 1


def race(contenders: Sequence[Contender], rounds: int, on_round: Callable[[int], None] = lambda done: None) -> list[Timing]:
    """Let every contender run once per round; return the timings in the contenders' order, equal on all ranks. A collective.

    `on_round(done)` is called after each round that counts. The barriers are gloo's for all contenders.
    """
    start_s = torch.zeros(len(contenders), rounds, dtype=torch.float64)
    end_s, cpu_s = torch.zeros_like(start_s), torch.zeros_like(start_s)
    for number in range(-WARM_UP_ROUNDS, rounds):
        for lane, contender in enumerate(contenders):
            times = _time(contender)
            if number >= 0:
                start_s[lane, number], end_s[lane, number], cpu_s[lane, number] = times
        if number >= 0:
            on_round(number + 1)
    # all ranks are on this machine, with one clock: a run begins with the first rank and ends when the last one has its result
    dist.all_reduce(start_s, op=dist.ReduceOp.MIN)
    dist.all_reduce(end_s, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu_s, op=dist.ReduceOp.SUM)
    calls = torch.tensor([[contender.calls] for contender in contenders])
    timings = zip((end_s - start_s) / calls, cpu_s / calls, strict=True)
    return [Timing(tuple(wall.tolist()), cpu.mean().item()) for wall, cpu in timings]


def _time(contender: Contender) -> tuple[float, float, float]:
    """When a run began and ended on this rank, in seconds, and the CPU seconds that it took."""
    contender.prepare()
    dist.barrier()
    cpu_start, start = time.process_time(), time.perf_counter()
    for _ in range(contender.calls):
        contender.run()
    end = time.perf_counter()
    dist.barrier()  # before the CPU time is read: work that an engine does for other ranks after it has its result is its cost, too
    return start, end, time.process_time() - cpu_start
