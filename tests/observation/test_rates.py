"""Rates, computed from successive looks at a cluster."""

from dataclasses import replace

import pytest

from shardnet.histogram import Histogram
from shardnet.observation.rates import WINDOW_S, Flow, RateMeter, Rates
from shardnet.observation.views import Steps
from shardnet.telemetry import Progress
from shardnet.traffic import Traffic
from tests.observation.views import cluster, stats, worker


def test_rates_are_those_of_the_last_seconds() -> None:
    meter = RateMeter()
    for second in range(20):
        speed = 2 if second < 10 else 4  # steps a second
        step = speed * second if second < 10 else 20 + 4 * (second - 10)
        now = worker(0, stats(step=step, bytes_sent=100 * step, bytes_received=50 * step, uptime_s=second))
        meter.add(float(second), cluster(now))
    assert WINDOW_S < 9
    found = meter.of(now)
    assert (found.step_s, found.sent, found.received) == pytest.approx((0.25, 400.0, 200.0))


def test_what_cannot_be_said_yet() -> None:
    meter = RateMeter()
    first = worker(0, stats(step=5))
    meter.add(0.0, cluster(first))
    assert meter.of(first) == Rates()
    assert meter.of(worker(1, stats())) == Rates()
    assert meter.of(worker(0, None, state="unreachable")) == Rates()
    meter.add(1.0, cluster(worker(0, stats(step=5, bytes_sent=10, uptime_s=101.0))))
    assert meter.of(first) == Rates(None, 10.0, 0.0)


def test_a_worker_that_has_started_anew_at_that_address() -> None:
    meter = RateMeter()
    meter.add(0.0, cluster(worker(0, stats(step=50, uptime_s=100.0))))
    again = worker(0, stats(step=60, uptime_s=1.0))
    meter.add(1.0, cluster(again))
    assert meter.of(again) == Rates()


def test_steps_are_as_long_as_they_were_however_long_that_is() -> None:
    meter = RateMeter()
    for second in range(30):
        times = Histogram()
        times.add(12 * 10**9, times=second // 12)
        now = worker(0, stats(step=second // 12, uptime_s=second, steps=Steps(times, 12.0 * (second // 12), 0.0)))
        meter.add(float(second), cluster(now))
        if second in (12, 24):
            assert meter.of(now).step_s == 12.0, "and not the length of the window"
    assert meter.of(now).step_s is None


def test_the_waiting_of_the_last_steps_and_before_them_of_all() -> None:
    meter = RateMeter()
    for second in range(20):
        times = Histogram()
        times.add(10**9, times=second)
        exposed_s = 0.25 * second if second < 10 else 0.5 * second
        now = worker(0, stats(step=second, uptime_s=second, exposed_s=9.0 + exposed_s, steps=Steps(times, second, exposed_s)))
        meter.add(float(second), cluster(now))
        if second == 4:
            assert meter.of(now).wait == 0.25
    assert meter.of(now).wait == 0.5
    assert RateMeter().of(now).wait == 0.5, "of all steps"
    for second in range(20, 30):
        assert now.stats is not None
        still = worker(0, replace(now.stats, uptime_s=second))
        meter.add(float(second), cluster(still))
    assert meter.of(still).wait == 0.5, "of all steps: none has ended for some seconds"


def test_waiting_that_nobody_measures_is_unknown_unless_the_program_says_it() -> None:
    steps = Steps(Histogram([100, *[0] * 18]), 10.0, 0.0)
    for share, known in ((0.0, None), (0.25, 0.25)):
        meter = RateMeter()
        for second in range(3):
            reported = Progress(second, exposed_share=share, tokens_per_s=1.0)
            now = worker(0, stats(uptime_s=second, steps=replace(steps, seconds=10.0 + second), progress=reported))
            meter.add(float(second), cluster(now))
        assert now.stats is not None
        assert (now.stats.wait_share, meter.of(now).wait) == (known, known)
    hidden = stats(exposed_s=0.1, steps=steps)
    assert hidden.wait_share == 0.0, "it is measured: before these steps something was waited for"


def test_flows_and_waits_are_those_of_the_epoch() -> None:
    meter = RateMeter()
    for second in range(3):
        said = stats(epoch=1, peers={1: Traffic(10 * second, 20 * second)}, late={1: 0.5 * second}, uptime_s=second)
        now = worker(0, said)
        meter.add(float(second), cluster(now))
    assert meter.flows(now) == {1: Flow(10.0, 20.0)}
    assert meter.waits(now) == {1: 0.5}
    again = worker(0, stats(epoch=2, peers={1: Traffic(1, 2)}, late={1: 0.1}, uptime_s=3.0))
    meter.add(3.0, cluster(again))
    assert (meter.flows(again), meter.waits(again)) == ({}, {}), "ranks are others' now"
    assert meter.flows(worker(1, None, state="unreachable")) == {}


def test_late_is_who_others_have_waited_for_in_the_last_seconds() -> None:
    meter = RateMeter()
    for second in range(3):
        waited = (0, {1: 20.0 + 0.5 * second, 2: 90.0}), (1, {2: 90.0 + 0.1 * second}), (2, {1: 9.0 * second})
        seen = [worker(rank, stats(late=late, uptime_s=second)) for rank, late in waited]
        meter.add(float(second), cluster(*seen))
        if second == 0:
            assert meter.late(seen) == [None, None, None]
    assert meter.late(seen) == pytest.approx([0.0, 1.0, 0.1]), (
        "what was before does not count, and a wait that began before no more than all of it"
    )
    silent = worker(3, None, state="unreachable")
    assert meter.late([seen[0], silent]) == [None, 0.0], "the silent one says nothing, and the other one nothing of itself"
