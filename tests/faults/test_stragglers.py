"""Workers that are slow but not dead: frozen for a moment again and again, or almost without processor time. Nobody is lost, and
the statistics say which worker is slow."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest

from shardnet.credentials import Security
from shardnet.loop import LoopThread
from shardnet.observation.observer import Observer
from tests.faults.ledger import SEED, Scenario, scenario
from tests.training.workers import Nursery, Worker, rendezvous

RANKS = 3
NODES = {"one node": "aaa", "a node each": "abc"}  # by rank
BURNERS = 7  # processes that want the same processor, each in its own session: a kernel may share time by session, regardless of niceness
SHORT_S, LONG_S = 4.0, 30.0
NAMED = 0.3  # the others must have waited for a slow worker for this share of the time
COUNTED_S = 5.0  # after the worker has become as quick as the others again

Fault = Callable[[Worker, float], None]  # makes a worker slow for so many seconds


def stutter(worker: Worker, seconds: float) -> None:
    """Stop a worker most of the time, but never for long."""
    rng, ends_s = random.Random(SEED), time.monotonic() + seconds
    while time.monotonic() < ends_s:
        worker.signal(signal.SIGSTOP)
        time.sleep(rng.uniform(0.02, 0.3))  # the fault's own length, like the next one
        worker.signal(signal.SIGCONT)
        time.sleep(rng.uniform(0.01, 0.1))


def starve(worker: Worker, seconds: float) -> None:
    """Put a worker on one processor with others that never sleep, so that it gets little of it even without other tests."""
    process, processors = psutil.Process(worker.pid), os.sched_getaffinity(worker.pid)
    before = process.cpu_times()
    with burning(min(processors)):
        place(process, {min(processors)}, 19)
        time.sleep(seconds)  # the fault's own length
        after = process.cpu_times()
    place(process, processors, 0)
    assert after.user + after.system - before.user - before.system < 0.3 * seconds, "it was not starved"


def place(process: psutil.Process, processors: set[int], niceness: int) -> None:
    """Set where all threads of a process may run, and their niceness."""
    for thread in process.threads():
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread.id, processors)
            os.setpriority(os.PRIO_PROCESS, thread.id, niceness)


@contextmanager
def burning(processor: int) -> Iterator[None]:
    """Run processes that never sleep on one processor."""
    with ExitStack() as stack:
        for _ in range(BURNERS):
            burner = stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"], start_new_session=True))
            stack.callback(burner.kill)
            os.sched_setaffinity(burner.pid, {processor})
        yield


@pytest.mark.parametrize(("place", "fault"), [("one node", stutter), ("a node each", starve)])
def test_a_slow_worker_is_named_and_not_lost(nursery: Nursery, place: str, fault: Fault) -> None:
    _slow_down(nursery, Scenario(place), place, fault, SHORT_S)


@pytest.mark.faults
@pytest.mark.parametrize("fault", [stutter, starve])
@pytest.mark.parametrize("place", NODES)
def test_each_worker_is_slow_for_a_while(nursery: Nursery, place: str, fault: Fault) -> None:
    with scenario(f"{fault.__name__} for {LONG_S:g} s: {place}") as figures:
        for _ in range(3):
            _slow_down(nursery, figures, place, fault, LONG_S)


def _slow_down(nursery: Nursery, figures: Scenario, place: str, fault: Fault, seconds: float) -> None:
    rng = random.Random(f"{SEED} {place} {figures.repeats}")
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(RANKS)]
        work = {"work": "stream", "seed": rng.randrange(10**6), "rows": 10_000}
        for worker, node in zip(workers, NODES[place], strict=True):
            worker.tell(job="slow", world_size=RANKS, node=node, **work)
        for worker in workers:
            worker.hear("joined")
        for worker in workers:
            worker.hear("streaming")
        slow = rng.choice(workers)
        before = late_s(workers)
        fault(slow, seconds)
        after, deadline = late_s(workers), time.monotonic() + COUNTED_S
        while after[slow.rank] - before[slow.rank] <= NAMED * seconds and time.monotonic() < deadline:
            after = late_s(workers)  # a wait counts only after it has ended
        workers[0].tell(stop=True)
        left = [worker.hear("left") for worker in workers]
        assert [(each["error"], each["leaks"]) for each in left] == [(None, [])] * RANKS, left
        waited_s = {rank: after[rank] - before[rank] for rank in after}
        print(f"{place}, {fault.__name__} of rank {slow.rank} for {seconds:g} s; waited for by rank: {waited_s}", flush=True)
        assert max(waited_s, key=waited_s.__getitem__) == slow.rank
        assert waited_s[slow.rank] > NAMED * seconds, "it was not slow, or nobody noticed"
        assert [worker.end() for worker in workers] == [0] * RANKS
        figures.repeats += 1


def late_s(workers: list[Worker]) -> dict[int, float]:
    """For each rank, the longest time that any other rank says it has waited for it."""
    observer, loop = Observer(Security(), timeout_s=10.0), LoopThread.shared()
    late = [loop.run(observer.look(worker.address)).result().stats.late for worker in workers]
    return {rank: max(each.get(rank, 0.0) for each in late) for rank in range(RANKS)}
