"""`LayerTimingStats`: how long one layer took."""

from dataclasses import dataclass


@dataclass(slots=True)
class LayerTimingStats:
    """One layer's executions, their total, shortest and longest time in ns; the shortest is None before the first."""

    forward_executions: int = 0
    backward_executions: int = 0
    total_forward_time: int = 0
    total_backward_time: int = 0
    min_forward_time: int | None = None
    max_forward_time: int = 0
    min_backward_time: int | None = None
    max_backward_time: int = 0

    @property
    def average_forward_time(self) -> int:
        return average(self.total_forward_time, self.forward_executions)

    @property
    def average_backward_time(self) -> int:
        return average(self.total_backward_time, self.backward_executions)

    def record_forward(self, duration: int) -> None:
        self.merge(
            LayerTimingStats(forward_executions=1, total_forward_time=duration, min_forward_time=duration, max_forward_time=duration)
        )

    def record_backward(self, duration: int) -> None:
        self.merge(
            LayerTimingStats(backward_executions=1, total_backward_time=duration, min_backward_time=duration, max_backward_time=duration)
        )

    def merge(self, other: "LayerTimingStats") -> None:
        """Add what another rank, or another time, has measured of the same layer."""
        self.forward_executions += other.forward_executions
        self.backward_executions += other.backward_executions
        self.total_forward_time += other.total_forward_time
        self.total_backward_time += other.total_backward_time
        self.min_forward_time = _least(self.min_forward_time, other.min_forward_time)
        self.max_forward_time = max(self.max_forward_time, other.max_forward_time)
        self.min_backward_time = _least(self.min_backward_time, other.min_backward_time)
        self.max_backward_time = max(self.max_backward_time, other.max_backward_time)


def average(total: int, count: int) -> int:
    """Truncated to whole ns; 0 if `count` is 0."""
    return total // count if count else 0


def _least(left: int | None, right: int | None) -> int | None:
    if left is None or right is None:
        return right if left is None else left
    return min(left, right)
