"""Rates, from looks."""

import pytest

from shardnet.cli.live.pace import WINDOW_S, Pace, Rates
from tests.cli.live.views import cluster, stats, worker


def test_rates_are_those_of_the_last_seconds() -> None:
    pace = Pace()
    for second in range(20):
        speed = 2 if second < 10 else 4  # steps a second
        step = speed * second if second < 10 else 20 + 4 * (second - 10)
        now = worker(0, stats(step=step, bytes_sent=100 * step, bytes_received=50 * step, uptime_s=second))
        pace.add(float(second), cluster(now))
    assert WINDOW_S < 9
    found = pace.of(now)
    assert (found.step_s, found.sent, found.received) == pytest.approx((0.25, 400.0, 200.0))


def test_what_cannot_be_said_yet() -> None:
    pace = Pace()
    first = worker(0, stats(step=5))
    pace.add(0.0, cluster(first))
    assert pace.of(first) == Rates()
    assert pace.of(worker(1, stats())) == Rates()
    assert pace.of(worker(0, None, state="unreachable")) == Rates()
    pace.add(1.0, cluster(worker(0, stats(step=5, bytes_sent=10))))
    assert pace.of(first) == Rates(None, 10.0, 0.0)


def test_a_worker_that_has_started_anew_at_that_address() -> None:
    pace = Pace()
    pace.add(0.0, cluster(worker(0, stats(step=50, uptime_s=100.0))))
    again = worker(0, stats(step=60, uptime_s=1.0))
    pace.add(1.0, cluster(again))
    assert pace.of(again) == Rates()
