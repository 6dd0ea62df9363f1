"""`RateMeter`: how fast each worker is, from its statistics at several looks."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from shardnet.observation.views import ClusterView, Stats, WorkerView
from shardnet.traffic import Traffic

WINDOW_S = 5.0  # long enough that numbers can be read, short enough that they are about now
LATE_SHARE = 0.2  # of the time: if others have waited this long for a worker, it deserves attention
_NOTHING = Traffic()


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of one worker over the last WINDOW_S; None for values that are not known yet."""

    step_s: float | None = None  # seconds per step
    sent: float | None = None  # payload bytes per second
    received: float | None = None
    wait: float | None = None  # the part of the steps' time spent waiting for communication; of all steps, if none ended meanwhile


@dataclass(frozen=True, slots=True)
class Flow:
    """Payload bytes per second from a worker to one of its peers."""

    network: float
    memory: float


class RateMeter:
    """The looks of the last seconds; lives as long as someone watches."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, Stats]]] = deque()

    def add(self, at_s: float, view: ClusterView) -> None:
        """Add a look at the time `at_s`, of any clock that never goes back."""
        stats = {worker.address: worker.stats for job in view.jobs for worker in job.workers if worker.stats is not None}
        if not view.jobs:
            stats[view.address] = view.stats
        self._looks.append((at_s, stats))
        while len(self._looks) > 2 and at_s - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    def of(self, worker: WorkerView) -> Rates:
        """The rates of a worker, which is identified by its address; they start again if it was restarted there or has gone back to an
        earlier step."""
        span = self._span(worker)
        if span is None:
            return Rates(wait=None if worker.stats is None else worker.stats.wait_share)
        begin, end, took_s = span
        sent, received = end.bytes_sent - begin.bytes_sent, end.bytes_received - begin.bytes_received
        return Rates(_step_s(begin, end, took_s), sent / took_s, received / took_s, _wait(begin, end))

    def flows(self, worker: WorkerView) -> dict[int, Flow]:
        """The flows from the worker to each rank to which it has sent in this epoch; empty if they are not known yet."""
        span = self._span(worker, in_one_epoch=True)
        if span is None:
            return {}
        begin, end, took_s = span

        def flow(rank: int, now: Traffic) -> Flow:
            before = begin.peers.get(rank, _NOTHING)
            network, memory = now.sent_network - before.sent_network, now.sent_memory - before.sent_memory
            # An epoch has its number before its counters begin.
            return Flow(max(0, network) / took_s, max(0, memory) / took_s)

        return {rank: flow(rank, now) for rank, now in end.peers.items()}

    def waits(self, worker: WorkerView) -> dict[int, float]:
        """The share of the time for which the worker has waited for each other rank to enter collectives."""
        span = self._span(worker, in_one_epoch=True)
        if span is None:
            return {}
        begin, end, took_s = span
        waited_s = {rank: max(0.0, seconds - begin.late.get(rank, 0.0)) for rank, seconds in end.late.items()}
        return {
            rank: min(1.0, seconds / took_s) for rank, seconds in waited_s.items()
        }  # a wait counts when it ends, however long ago it began

    def late(self, workers: Sequence[WorkerView]) -> list[float | None]:
        """For each worker the share of the time for which the others have waited for it, according to the one that has waited longest; None
        if no other worker knows."""
        waits = {each.rank: self.waits(each) for each in workers if self._span(each, in_one_epoch=True) is not None}
        return [max((waited.get(each.rank, 0.0) for rank, waited in waits.items() if rank != each.rank), default=None) for each in workers]

    def _span(self, worker: WorkerView, *, in_one_epoch: bool = False) -> tuple[Stats, Stats, float] | None:
        """The worker's first and last statistics within the window, and the time between them by its own clock: the data of a look may be
        as old as the look before. In another epoch ranks belong to other workers."""
        if worker.stats is None:
            return None
        seen = [stats[worker.address] for _, stats in self._looks if worker.address in stats]
        if in_one_epoch:
            seen = [stats for stats in seen if stats.epoch == worker.stats.epoch]
        if len(seen) < 2:
            return None
        begin, end = seen[0], seen[-1]
        took_s = end.uptime_s - begin.uptime_s
        return None if took_s <= 0 else (begin, end, took_s)


def _wait(begin: Stats, end: Stats) -> float | None:
    """The waiting of the steps that ended meanwhile, or of all steps, if none did or no waiting is measured."""
    steps_s = end.steps.seconds - begin.steps.seconds
    if steps_s <= 0 or not end.exposed_s:
        return end.wait_share
    return min(max(0.0, (end.steps.exposed_s - begin.steps.exposed_s) / steps_s), 1.0)


def _step_s(begin: Stats, end: Stats, took_s: float) -> float | None:
    """The mean time of the steps that ended meanwhile, if their times are known: steps may be longer than the window."""
    timed = end.steps.times.count - begin.steps.times.count
    if timed > 0:
        return (end.steps.seconds - begin.steps.seconds) / timed
    steps = end.step - begin.step
    return took_s / steps if steps > 0 else None
