"""`Pace`: how fast each worker is, from what it has said at several looks."""

from collections import deque
from dataclasses import dataclass

from shardnet.cli.observation import ClusterView, Stats, WorkerView

WINDOW_S = 5.0  # long enough that numbers can be read, short enough that they are about now


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one worker, over the last WINDOW_S; None for what cannot be said yet."""

    step_s: float | None = None  # seconds a step
    sent: float | None = None  # payload bytes a second
    received: float | None = None


class Pace:
    """The looks of the last seconds; lives as long as somebody watches."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, dict[str, Stats]]] = deque()

    def add(self, at_s: float, view: ClusterView) -> None:
        """A look at `at_s`, of any clock that only goes on."""
        stats = {worker.address: worker.stats for job in view.jobs for worker in job.workers if worker.stats is not None}
        if not view.jobs:
            stats[view.address] = view.stats
        self._looks.append((at_s, stats))
        while len(self._looks) > 2 and at_s - self._looks[1][0] >= WINDOW_S:
            self._looks.popleft()

    def of(self, worker: WorkerView) -> Rates:
        """A worker is known by its address; one that has started anew there, or has gone back behind a step, begins anew."""
        seen = [(at_s, stats[worker.address]) for at_s, stats in self._looks if worker.address in stats]
        if len(seen) < 2 or worker.stats is None:
            return Rates()
        (begin_s, begin), (end_s, end) = seen[0], seen[-1]
        took_s = end_s - begin_s
        if took_s <= 0 or end.uptime_s < begin.uptime_s:
            return Rates()
        steps = end.step - begin.step
        return Rates(
            took_s / steps if steps > 0 else None,
            (end.bytes_sent - begin.bytes_sent) / took_s,
            (end.bytes_received - begin.bytes_received) / took_s,
        )
