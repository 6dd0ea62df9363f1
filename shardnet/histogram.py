"""`Histogram`: how durations are distributed, counted as they come.

[Note: bounds] The bounds go from 100 µs, the time of a small collective inside a node at best, to 60 s, after which one fails by
default (`Timeouts.collective_s`). There are three per decade, so that on any network a quantile is known to within a factor of 2.5,
and two histograms can be added up. The bounds are the same for everything and for ever, because dashboards compare buckets of
different days. Counting costs a search among 18 numbers, which is nothing compared with the lock that is held for it.
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_BOUNDS_NS = tuple(round(1e9 * bound) for bound in BOUNDS_S)


@dataclass(slots=True)
class Histogram:
    """Counts of durations by bucket. A bucket reaches from the previous bound, excluded, to its own of BOUNDS_S, included; the last one
    counts durations above all bounds. To change it from several threads, hold a lock."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, duration_ns: int, times: int = 1) -> None:
        self.counts[bisect_left(_BOUNDS_NS, duration_ns)] += times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def copy(self) -> "Histogram":
        return Histogram(self.counts.copy())

    def quantile(self, share: float) -> float:
        """About how many seconds this share of the durations took at most, assuming that they are spread evenly in their bucket (like
        Prometheus' histogram_quantile). Durations above the last bound count as that bound. NaN if there are none."""
        wanted, below = share * self.count, 0
        if not wanted:
            return math.nan
        for bound_s, lower_s, count in zip(BOUNDS_S, (0.0, *BOUNDS_S), self.counts, strict=False):
            if count and below + count >= wanted:
                return lower_s + (bound_s - lower_s) * (wanted - below) / count
            below += count
        return BOUNDS_S[-1]
