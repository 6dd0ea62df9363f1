"""`Chronicle`: events, found by comparing each look with the one before."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from shardnet.observation.views import GONE, LOST, ClusterView, JobView, WorkerView

KEPT = 100
LOST_WORDS = " (all workers are gone, and none had reported the end of the training)"


@dataclass(frozen=True, slots=True)
class Event:
    """`at_s` is in seconds since 1970. `bad`: the event is a reason to worry."""

    at_s: float
    what: str
    bad: bool = False


class Chronicle:
    """The last events, the newest last; lives as long as someone watches."""

    def __init__(self) -> None:
        self.events: deque[Event] = deque(maxlen=KEPT)
        self._before: ClusterView | None = None
        self._new = 0

    def add(self, at_s: float, view: ClusterView) -> None:
        """Add the next look. The first look gives no events."""
        if self._before is not None:
            found = [Event(at_s, what, bad) for what, bad in _changes(self._before, view)]
            self.events.extend(found)
            self._new += len(found)
        self._before = view

    def take_new(self) -> list[Event]:
        """The events that have not been taken before."""
        count, self._new = min(self._new, len(self.events)), 0
        return list(self.events)[len(self.events) - count :]


def _changes(before: ClusterView, now: ClusterView) -> Iterator[tuple[str, bool]]:
    if before.health != now.health:
        yield f"{now.stats.role} {now.address} is {now.health}", now.health != "serving"
    known = {job.job: job for job in before.jobs}
    for job in now.jobs:
        if job.job not in known:
            yield f"job {job.job}: {job.state}", False
        else:
            yield from _of_job(known[job.job], job)
    for name in known.keys() - {job.job for job in now.jobs}:
        yield f"job {name} is over", False


def _of_job(before: JobView, now: JobView) -> Iterator[tuple[str, bool]]:
    if now.epoch != before.epoch:
        yield f"job {now.job}: epoch {now.epoch} with {sum(worker.state != GONE for worker in now.workers)} workers", False
    elif now.state != before.state:
        yield f"job {now.job}: {now.state}{LOST_WORDS if now.state == LOST else ''}", now.state == LOST
    if now.first_lost not in ("", before.first_lost):
        yield f"job {now.job}: {now.first_lost}", True
    known = {worker.address: worker for worker in before.workers}
    for worker in now.workers:
        if worker.address not in known:
            yield f"{_name(worker)} has joined", False
            continue
        earlier = known.pop(worker.address)
        if worker.state != earlier.state:  # nobody reports the machine of a worker that is gone
            yield f"{_name(worker if worker.node else earlier)} is {worker.state}", worker.state != "serving"
        yield from _of_worker(earlier, worker)
    for worker in known.values():
        if worker.state != GONE and now.workers:  # when all workers have gone, the job's state says so
            yield f"{_name(worker)} is gone", True


def _of_worker(before: WorkerView, now: WorkerView) -> Iterator[tuple[str, bool]]:
    if before.stats is None or now.stats is None:
        return
    waited_in = {each.collective for each in before.stats.waiting}
    for each in now.stats.waiting:
        if each.collective not in waited_in:
            yield f"rank {now.rank} waits in {each.collective} for {'; '.join(map(str, each.absent))}", True
    failed = sum(op.failed for op in now.stats.collectives.values()) - sum(op.failed for op in before.stats.collectives.values())
    if failed > 0:
        yield f"rank {now.rank}: {failed} collective{'s have' if failed > 1 else ' has'} failed", True
    if now.stats.step < before.stats.step:
        yield f"rank {now.rank} goes on after step {now.stats.step}; it had reached step {before.stats.step}", False


def _name(worker: WorkerView) -> str:
    return f"rank {worker.rank} ({worker.address}{f', {worker.host}' if worker.node else ''})"
