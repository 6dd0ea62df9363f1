"""What a story keeps of the looks at a cluster, and for how long."""

from dataclasses import replace

import pytest

from shardnet.histogram import Histogram
from shardnet.observation.views import ClusterView, Stats, Steps, WorkerView
from shardnet.telemetry import Progress
from shardnet.traffic import Traffic
from shardnet.web.history import KEPT_POINTS, KEPT_RATES, Point
from shardnet.web.story import MAX_HISTORIES, Story
from tests.observation.views import cluster, stats, worker

HERE_SINCE_S = 1_700_000_000.0


def said(step: int, second: int, **facts: object) -> Stats:
    """What a worker reports whose steps take half a second and each send 100 bytes over the network and 300 through memory."""
    times = Histogram()
    times.add(500_000_000, times=step)
    progress = Progress(step, 1000, loss=3.0, tokens_per_s=800.0)
    peers = {1: Traffic(100 * step, 300 * step)}
    known = {"bytes_sent": 400 * step, "uptime_s": second, "epoch": 1, "steps": Steps(times, 0.5 * step, 0.0), "peers": peers}
    return stats(step=step, progress=progress, **(known | facts))


def told(story: Story, second: int, view: ClusterView) -> Point | None:
    story.add(HERE_SINCE_S + second, float(second), view)
    points = story.histories["lm"].points if "lm" in story.histories else ()
    return points[-1] if points else None


def test_a_point_for_each_look() -> None:
    story = Story()
    for second in range(4):
        point = told(story, second, cluster(worker(0, said(2 * second, second)), worker(1, said(2 * second, second))))
    assert point == Point(4, HERE_SINCE_S + 3, 1, 6, 3.0, 800.0, 0.5, 400.0, 1200.0)
    assert [each.number for each in story.histories["lm"].since(2)] == [3, 4]
    assert list(story.histories["lm"].since(4)) == []


def test_a_training_that_stands_has_no_throughput_whatever_was_reported_last() -> None:
    story = Story()
    for second in range(4):
        told(story, second, cluster(worker(0, said(2 * second, second))))
    rates = []
    for second in range(4, 12):
        point = told(story, second, cluster(worker(0, said(6, second))))
        assert point is not None
        rates.append((point.tokens_per_s, point.step_s))
    assert rates[:5] == [(800.0, 0.5)] * 5, "within the window it may only be between two steps"
    assert rates[5:] == [(0.0, None)] * 3
    point = told(story, 12, cluster(worker(0, said(7, 12))))
    assert point is not None
    assert point.tokens_per_s == 800.0


def test_workers_that_do_not_answer_are_a_gap() -> None:
    story = Story()
    told(story, 0, cluster(worker(0, said(1, 0))))
    point = told(story, 1, cluster(worker(0, state="unreachable")))
    assert point == Point(2, HERE_SINCE_S + 1, 1, None, None, None, None, None, None)


def test_nothing_is_kept_before_the_first_worker_and_after_the_end() -> None:
    story = Story()
    assert told(story, 0, cluster(state="forming")) is None
    told(story, 1, cluster(worker(0, said(1, 1))))
    told(story, 2, cluster(state="forming", epoch=1))
    told(story, 3, cluster(state="finished", epoch=1))
    told(story, 4, cluster(state="finished", epoch=1))
    assert [(point.number, point.step) for point in story.histories["lm"].points] == [(2, 1), (3, None)]
    story.add(5.0, 5.0, replace(cluster(), jobs=()))
    assert story.histories == {}, "the rendezvous has forgotten the job"


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story()
    for second in range(KEPT_POINTS + 50):
        told(story, second, cluster(worker(0, said(second, second), state=("serving", "not serving")[second % 2])))
    history = story.histories["lm"]
    assert (len(history.points), history.points[0].number) == (KEPT_POINTS, 51)
    assert len(history.sent(worker(0))) == KEPT_RATES
    assert len(story.events(0)) == 100
    assert story.events(0)[-1][0] == story.number
    (job,) = cluster(worker(0, said(1, 1))).jobs
    finished = [replace(job, job=f"old {number}", state="finished", workers=()) for number in range(2 * MAX_HISTORIES)]
    story.add(0.0, 10_000.0, replace(cluster(), jobs=(*finished, job)))
    assert len(story.histories) == MAX_HISTORIES
    assert len(story.histories["lm"].points) == KEPT_POINTS, "one that runs goes before those that have been"


def test_rates_of_workers_that_have_gone_are_forgotten() -> None:
    story = Story()
    both: tuple[WorkerView, ...] = (worker(0, said(1, 0)), worker(1, said(1, 0)))
    told(story, 0, cluster(*both))
    told(story, 1, cluster(both[0], replace(both[1], state="gone", stats=None)))
    assert [len(story.histories["lm"].sent(each)) for each in both] == [2, 0]


def test_events_have_the_number_of_their_look() -> None:
    story = Story()
    for second, state in enumerate(("serving", "serving", "unreachable")):
        told(story, second, cluster(worker(0, state=state)))
    assert [(number, event.at_s, event.what, event.bad) for number, event in story.events(0)] == [
        (3, HERE_SINCE_S + 2, "rank 0 (10.0.0.0:7001, node-0) is unreachable", True)
    ]
    assert story.events(3) == []
