"""`Timeline`: what the training thread is doing, for the trace and the share of exposed communication."""

import time
from contextlib import nullcontext
from typing import TypeVar

from torch.autograd import profiler

from shardnet.backend import Pending
from shardnet.telemetry import Pass, Telemetry, Track

T = TypeVar("T")
OPTIMIZER = "optimizer"  # what the thread computes in while one steps within backward


class Timeline:
    """Cuts the training thread's time into computing in one unit, waiting for a collective, and neither.

    Spans do not overlap: while an inner unit computes, and while a collective is waited for, the outer unit does not.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        telemetry.times_waiting = True
        self._computing: str | None = None
        self._since_ns = 0
        self._computed_ns: dict[str, int] = {}  # in the pass that is under way, by name

    @property
    def computing(self) -> str | None:
        """What `compute` was last told."""
        return self._computing

    def compute(self, name: str | None) -> None:
        """From now on the thread computes in `name`; None: in no unit."""
        now = time.perf_counter_ns()
        if self._computing is not None:
            self._telemetry.record(self._computing, Track.COMPUTE, self._since_ns, now)
            self._computed_ns[self._computing] = self._computed_ns.get(self._computing, 0) + now - self._since_ns
        self._computing, self._since_ns = name, now

    def end_pass(self, kind: Pass | None) -> None:
        """A forward or backward is over; None: it broke off, or was none, and counts for nothing."""
        computed, self._computed_ns = self._computed_ns, {}
        if kind is not None:
            self._telemetry.end_pass(kind, computed)

    def wait(self, pending: Pending[T], name: str) -> T:
        """The result of a collective. Time spent blocked here is recorded as exposed."""
        if pending.done():
            return pending.wait()
        computing = self._computing
        self.compute(None)
        start = time.perf_counter_ns()
        try:
            with profiler.record_function(f"shardnet: {name}") if profiler._is_profiler_enabled else nullcontext():
                return pending.wait()
        finally:
            self._telemetry.record(name, Track.EXPOSED, start, time.perf_counter_ns())
            self.compute(computing)
