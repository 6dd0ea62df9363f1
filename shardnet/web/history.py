"""`History`: the course of one job, with a point for each look."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardnet.observation.rates import WINDOW_S, RateMeter
from shardnet.observation.views import GONE, OVER, JobView, WorkerView

KEPT_POINTS = 900  # 15 minutes at one look per second; 0.3 MB
KEPT_RATES = 90  # of each worker: as many as fit into a small curve
_STILL_STEPS = 3.0  # if no step has ended for the time of so many steps, the training stands still


@dataclass(frozen=True, slots=True)
class Point:
    """The values of one look, whose number is `number`; unknown values are None. Bytes are payload per second, over all workers."""

    number: int
    at_s: float
    epoch: int
    step: int | None
    loss: float | None
    tokens_per_s: float | None
    step_s: float | None
    network: float | None
    memory: float | None


class History:
    """The points of one job, and the send rates of each worker; lives as long as the job is known."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=KEPT_POINTS)
        self._sent: dict[str, deque[float | None]] = {}  # by address: bytes per second
        self._step = -1
        self._step_s: float | None = None  # the time of the last step that was timed
        self._moved_s = -math.inf  # when the step last changed

    def add(self, number: int, at_s: float, now_s: float, job: JobView, meter: RateMeter) -> None:
        """Add a look at `now_s` of a clock that never goes back, which is `at_s` since 1970. Before the first worker nothing is kept."""
        here = [worker for worker in job.workers if worker.state != GONE]
        if not (here or (self.points and job.state not in OVER)):
            return
        self._sent = {worker.address: self._sent.get(worker.address, deque(maxlen=KEPT_RATES)) for worker in here}
        for worker in here:
            self._sent[worker.address].append(meter.of(worker).sent)
        self.points.append(self._point(number, at_s, now_s, job.epoch, here, meter))

    def since(self, number: int) -> Iterator[Point]:
        """The points of looks after `number`."""
        return (point for point in self.points if point.number > number)

    def sent(self, worker: WorkerView) -> list[float | None]:
        """The worker's send rates at the last looks."""
        return list(self._sent.get(worker.address, ()))

    def _point(self, number: int, at_s: float, now_s: float, epoch: int, here: list[WorkerView], meter: RateMeter) -> Point:
        network, memory = traffic(here, meter)
        leader = next((worker for worker in here if worker.stats is not None), None)
        if leader is None or leader.stats is None:
            return Point(number, at_s, epoch, None, None, None, None, network, memory)
        stats, timed_s = leader.stats, meter.of(leader).step_s
        if stats.step != self._step:
            self._step, self._moved_s = stats.step, now_s
        self._step_s = timed_s or self._step_s
        moves = now_s - self._moved_s <= max(WINDOW_S, _STILL_STEPS * (self._step_s or 0.0))
        tokens_per_s = stats.progress.tokens_per_s or None
        return Point(
            *(number, at_s, epoch, stats.step, None if math.isnan(stats.progress.loss) else stats.progress.loss),
            # Values that were reported with the last step stay for ever: they are shown as current only while steps go on.
            tokens_per_s=tokens_per_s if moves else tokens_per_s and 0.0,
            step_s=self._step_s if moves else None,
            network=network,
            memory=memory,
        )


def traffic(workers: Iterable[WorkerView], meter: RateMeter) -> tuple[float | None, float | None]:
    """What the workers send each other over the network and through memory, in bytes per second; None if no worker reports it."""
    flows = [flow for worker in workers for flow in meter.flows(worker).values()]
    return (sum(flow.network for flow in flows), sum(flow.memory for flow in flows)) if flows else (None, None)
