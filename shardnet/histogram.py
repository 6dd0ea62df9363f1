"""`Histogram`: how durations are distributed, counted as they come.

[Note: bounds] From 100 µs, which a small collective inside a node takes at best, to 60 s, after which one fails by default
(`Timeouts.collective_s`). Three a decade, so that whatever the network is, a quantile is known to within a factor of 2.5, and
two versions of it can be added up. They are the same for everything and for ever: dashboards compare buckets of different
days. To count costs a search among 18 numbers, which is nothing beside the lock that is held for it.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_BOUNDS_NS = tuple(round(1e9 * bound) for bound in BOUNDS_S)


@dataclass(slots=True)
class Histogram:
    """Counts of durations by bucket: up to each of BOUNDS_S, bound included and above the one before, and in the last one what is longer
    than all of them. Whoever changes it from several threads holds a lock."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, duration_ns: int, times: int = 1) -> None:
        self.counts[bisect_left(_BOUNDS_NS, duration_ns)] += times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> "Histogram":
        return Histogram(self.counts.copy())

    def quantile(self, share: float) -> float:
        """About how many seconds this share of the durations took at most, as if they lay evenly in their bucket (Prometheus'
        histogram_quantile does the same); what is above the last bound counts as that. NaN if there are none."""
        wanted, below = share * self.count, 0
        if not wanted:
            return math.nan
        for bound_s, lower_s, count in zip(BOUNDS_S, (0.0, *BOUNDS_S), self.counts, strict=False):
            if count and below + count >= wanted:
                return lower_s + (bound_s - lower_s) * (wanted - below) / count
            below += count
        return BOUNDS_S[-1]
