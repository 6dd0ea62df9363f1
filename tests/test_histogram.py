"""How durations are counted: histograms, the pace of steps, stalls."""

import math
import time
from itertools import pairwise

import pytest

from shardnet.flight import Flight, Party
from shardnet.histogram import BOUNDS_S, Histogram
from shardnet.pace import Pace
from shardnet.telemetry import Telemetry
from shardnet.waiting import Stalls, Waiting

MS, S = 10**6, 10**9


def test_bounds_grow_by_at_most_two_and_a_half_so_that_a_quantile_is_known_to_that_factor() -> None:
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (100e-6, 60.0)
    assert all(1.9 < above / below <= 2.5 for below, above in pairwise(BOUNDS_S))


def test_a_bound_belongs_to_its_bucket() -> None:
    histogram = Histogram()
    for duration_ns in (0, 100_000, 100_001, 60 * S, 60 * S + 1):
        histogram.add(duration_ns)
    assert (histogram.counts[:2], histogram.counts[-2:], histogram.count) == ([2, 1], [1, 1], 5)


def test_quantiles_lie_in_their_bucket() -> None:
    histogram = Histogram()
    assert math.isnan(histogram.quantile(0.5))
    histogram.add(2 * MS, 50)  # between 1 and 2.5 ms
    histogram.add(30 * S, 50)  # between 25 and 60 s
    assert histogram.quantile(0.25) == pytest.approx(0.001 + 0.0015 / 2)
    assert histogram.quantile(0.5) == pytest.approx(0.0025)
    assert 25.0 < histogram.quantile(0.99) < 60.0
    histogram.add(3600 * S, 1000)
    assert histogram.quantile(0.9) == 60.0


def test_steps_are_timed_and_what_is_said_twice_counts_once() -> None:
    pace = Pace()
    pace.reach(10, 1 * S, 0)  # a training that goes on: no step has been seen yet
    pace.reach(11, 2 * S, S // 4)
    pace.reach(11, 3 * S, S // 4)
    pace.reach(13, 4 * S, S // 2)  # two at once, in 2 s
    assert (pace.times.count, pace.seconds, pace.exposed_s) == (3, 3.0, 0.5)
    assert pace.times.counts[BOUNDS_S.index(1.0)] == 3
    pace.reach(12, 9 * S, S // 2)  # it went back
    assert pace.times.count == 3


def test_no_step_lies_between_two_epochs() -> None:
    telemetry = Telemetry()
    for step in (1, 2):
        telemetry.reach(step)
    telemetry.begin_epoch()
    for step in (2, 3):
        telemetry.reach(step)
    telemetry.begin_epoch()
    telemetry.reach(4)
    _, pace = telemetry.totals()
    assert (pace.times.count, telemetry.epochs) == (2, 2)


def test_what_is_stuck_counts_once_with_all_its_time() -> None:
    now_ns = time.perf_counter_ns()
    first, second = (Flight(Party(1, 0, (0, 1)), n, "barrier", "", 0, now_ns - 5 * S, entered_ns=now_ns - 5 * S) for n in (1, 2))
    stalls = Stalls()
    stalls.note([Waiting(first, ())])
    stalls.note([Waiting(first, ()), Waiting(second, ())])
    assert stalls.count == 2
    assert stalls.seconds >= 10.0
    first.ended_ns, second.ended_ns = first.entered_ns + 6 * S, second.entered_ns + 7 * S
    assert stalls.seconds == 13.0
    stalls.note([])
    assert (stalls.count, stalls.seconds) == (2, 13.0)
