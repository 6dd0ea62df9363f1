"""`History`: how one job has gone, a point for each look."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardnet.observation.rates import WINDOW_S, RateMeter
from shardnet.observation.views import GONE, OVER, JobView, WorkerView

KEPT_POINTS = 900  # 15 minutes at a look a second; 0.3 MB
KEPT_RATES = 90  # of each worker: as much as a small curve has room for
_STILL_STEPS = 3.0  # no step for as long as that many take: the training stands


@dataclass(frozen=True, slots=True)
class Point:
    """One look. `number` is the look's; None is what nobody has said. Bytes are payload, a second, over all workers."""

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
    """The points of one job, and what each worker has sent; lives as long as the job is known."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=KEPT_POINTS)
        self._sent: dict[str, deque[float | None]] = {}  # by address: bytes a second
        self._step = -1
        self._step_s: float | None = None  # of the last one that was timed
        self._moved_s = -math.inf  # when there was another step than before

    def add(self, number: int, at_s: float, now_s: float, job: JobView, meter: RateMeter) -> None:
        """A look at `now_s` of a clock that only goes on, which is `at_s` since 1970. Before the first worker there is nothing to keep."""
        here = [worker for worker in job.workers if worker.state != GONE]
        if not (here or (self.points and job.state not in OVER)):
            return
        self._sent = {worker.address: self._sent.get(worker.address, deque(maxlen=KEPT_RATES)) for worker in here}
        for worker in here:
            self._sent[worker.address].append(meter.of(worker).sent)
        self.points.append(self._point(number, at_s, now_s, job.epoch, here, meter))

    def since(self, number: int) -> Iterator[Point]:
        """The points of later looks than that."""
        return (point for point in self.points if point.number > number)

    def sent(self, worker: WorkerView) -> list[float | None]:
        """Of the last looks."""
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
            # What was reported with the last step stays so for ever: it is said of now only while there are steps.
            tokens_per_s=tokens_per_s if moves else tokens_per_s and 0.0,
            step_s=self._step_s if moves else None,
            network=network,
            memory=memory,
        )


def traffic(workers: Iterable[WorkerView], meter: RateMeter) -> tuple[float | None, float | None]:
    """What they send each other over the network and through memory, in bytes a second; None if nobody says."""
    flows = [flow for worker in workers for flow in meter.flows(worker).values()]
    return (sum(flow.network for flow in flows), sum(flow.memory for flow in flows)) if flows else (None, None)
