"""`ClusterRun`: the workers of one run of a training function, from the first to the last."""

import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from shardnet.testing.fault import Action, Fault
from shardnet.testing.fault_not_fired import FaultNotFired
from shardnet.testing.harm import Harm
from shardnet.testing.meeting import Meeting
from shardnet.testing.news import Doing, Ended, Fired, Gone, Joined, News
from shardnet.testing.rank_failure import RankFailure, RanksFailed
from shardnet.testing.relays import Relays

JOINS_S = 20.0  # within which a process has started and asked to join
DOING_S = 3.0  # to find out where a worker is stuck


class Worker(Protocol):
    """One worker, which starts when it is made."""

    def kill(self) -> None:
        """End it without a goodbye."""

    def thaw(self) -> None:
        """Let it go on after it has frozen itself."""

    def doing(self, within_s: float) -> Doing:
        """What it is doing, if that can be found out."""

    def join(self) -> int:
        """Wait until it has ended; returns its exit status."""

    def output(self) -> str:
        """What it has written, when it has ended."""


Start = Callable[[int, Callable[[News], None]], Worker]  # starts the worker with a number


class ClusterRun:
    """Starts workers, carries out the ordered faults, and collects the workers' news; for one thread, and one call of `run`."""

    def __init__(self, start: Start, world_size: int, faults: Mapping[int, Fault], relays: Relays, meeting: Meeting) -> None:
        self._start = start
        self._world_size = world_size
        self._faults = faults
        self._relays = relays
        self._meeting = meeting
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._ranks: dict[int, int] = {}  # by number
        self._ends: dict[int, Ended] = {}
        self._gone: set[int] = set()
        self._fired: set[int] = set()
        self._killed: set[int] = set()
        self._harms: dict[Fault, Harm] = {}
        self._timers: list[threading.Timer] = []

    def run(self, timeout_s: float) -> list[Any]:
        """The results of the training function, by rank, then those of joiners; None for workers that were killed by order.

        Raises RanksFailed, and FaultNotFired if all went well but an ordered fault did not happen.
        """
        __tracebackhide__ = True
        ends_s = time.monotonic() + timeout_s
        try:
            for _ in range(self._world_size):
                self._add_worker()
            while len(self._gone) < len(self._workers):
                self._hear(self._news.get(timeout=max(0.0, ends_s - time.monotonic())))
        except queue.Empty:
            self._give_up(timeout_s)
        finally:
            self._end()
        self._check()
        return [self._ends[number].result if number in self._ends else None for number in self._in_order()]

    def _add_worker(self) -> None:
        self._workers.append(self._start(len(self._workers), self._news.put))

    def _in_order(self) -> list[int]:
        """The numbers of workers, by their first ranks; later workers after the others."""
        first = range(self._world_size)
        return [*sorted(first, key=lambda number: self._ranks.get(number, self._world_size)), *range(self._world_size, len(self._workers))]

    # --- what workers say

    def _hear(self, news: News) -> None:
        match news:
            case Joined(number, rank):
                self._ranks[number] = rank
            case Fired(number, fault, done):
                self._fired.add(fault)
                self._do(number, self._faults[fault])
                done()
            case Ended(number):
                self._ends[number] = news
            case Gone(number):
                status = self._workers[number].join()
                self._gone.add(number)
                if number not in self._ends and number not in self._killed:
                    self._ends[number] = Ended(number, failure=RankFailure("Died", f"the process {_in_words(status)}"))

    def _do(self, number: int, fault: Fault) -> None:
        """Carry out this end's part of a fault."""
        match fault.action:
            case Action.KILL:
                self._killed.add(number)
            case Action.FREEZE:
                self._later(fault.seconds, self._workers[number].thaw)
            case Action.JOIN:
                self._add_worker()
                self._meeting.somebody_waits(JOINS_S)  # or a training of few steps would be over before; failures are reported
            case Action.LINK:
                self._relays.worsen(number, fault.conditions)
            case Action.HARM:
                self._harms[fault] = self._relays.harm(number, fault.kind, fault.least_bytes)
            case Action.CUT | Action.HOLD:
                self._relays.interrupt(number, hold=fault.action is Action.HOLD)
                self._later(fault.seconds, lambda: self._relays.mend(number))

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._timers.append(threading.Timer(seconds, act))
        self._timers[-1].start()

    # --- the end

    def _give_up(self, timeout_s: float) -> None:
        """The time is over: note which workers have not ended, and where each of them is."""
        stuck = [number for number in range(len(self._workers)) if number not in self._ends and number not in self._killed]
        for number in stuck:
            doing = self._workers[number].doing(DOING_S)
            ranks = " and ".join(map(str, doing.waits_for))
            message = f"it had not ended after {timeout_s:g} s" + (f", and waits for rank {ranks}" if ranks else "")
            self._ends[number] = Ended(number, failure=RankFailure("Hung", message, doing.stacks, waits_for=doing.waits_for))

    def _end(self) -> None:
        """End everything, so that nothing is left running, whatever has happened."""
        for timer in self._timers:
            timer.cancel()
        for number, worker in enumerate(self._workers):
            if number not in self._gone:
                worker.kill()
        for number, worker in enumerate(self._workers):
            if number not in self._gone:
                worker.join()
        for timer in self._timers:
            timer.join()
        for number, worker in enumerate(self._workers):
            who = f"[rank {self._ranks[number]}]" if number in self._ranks else f"[worker {number}]"
            for line in worker.output().splitlines():
                print(who, line, file=sys.stdout)

    def _check(self) -> None:
        __tracebackhide__ = True
        failures = [
            replace(end.failure, rank=self._ranks.get(number, -1))
            for number, end in self._ends.items()
            if end.failure is not None and number not in self._killed
        ]
        if failures:
            failed = RanksFailed(failures, len(self._workers))
            if (skip := failed.skip) is not None:
                raise skip
            raise failed
        missing = [str(fault) for number, fault in self._faults.items() if number not in self._fired]
        if missing:
            raise FaultNotFired(
                f"the run ended before these faults were due: {'; '.join(missing)} (a step counts when `Cluster.report(step=...)` or "
                "`State.commit(step)` names it, a pass if `Cluster.shard` has made the model; ranks are those of the first epoch)"
            )
        for fault, harm in self._harms.items():
            if not harm.fired:
                raise FaultNotFired(f"{fault}: no block of {fault.least_bytes} bytes or more was sent to that rank from then on")
        if not self._killed.union(self._ranks).issuperset(range(len(self._workers))):
            raise FaultNotFired("a worker that was ordered to join came after the training had ended; let it join at an earlier step")


def _in_words(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status} before it had finished"
