"""`Chronicle`: the events between two looks at a cluster."""

from dataclasses import replace

from shardnet.observation.chronicle import Chronicle
from shardnet.observation.views import ClusterView, Stuck
from shardnet.telemetry import OpCounter
from shardnet.waiting import Absent
from tests.observation.views import cluster, stats, worker

TWO = cluster(worker(0, stats(step=7)), worker(1, stats(step=7)))


def told(*views: ClusterView) -> list[tuple[str, bool]]:
    chronicle = Chronicle()
    for number, view in enumerate(views):
        chronicle.add(float(number), view)
    return [(event.what, event.bad) for event in chronicle.events]


def test_what_is_there_at_first_is_no_event() -> None:
    assert told(TWO, TWO, TWO) == []


def test_a_death_and_what_follows() -> None:
    dead = cluster(worker(0, stats(step=7)), worker(1, state="unreachable"))
    after = cluster(worker(0, stats(step=6)), epoch=2)
    assert told(TWO, dead, after) == [
        ("rank 1 (10.0.0.1:7001, node-1) is unreachable", True),
        ("job lm: epoch 2 with 1 workers", False),
        ("rank 0 goes on after step 6; it had reached step 7", False),
        ("rank 1 (10.0.0.1:7001, node-1) is gone", True),
    ]


def test_of_one_that_is_gone_it_is_still_said_where_it_was() -> None:
    gone = cluster(TWO.jobs[0].workers[0], replace(worker(1, state="gone"), node=""))
    assert told(TWO, gone) == [("rank 1 (10.0.0.1:7001, node-1) is gone", True)]


def test_who_comes() -> None:
    three = cluster(*TWO.jobs[0].workers, worker(2), epoch=2)
    assert told(TWO, three) == [("job lm: epoch 2 with 3 workers", False), ("rank 2 (10.0.0.2:7001, node-2) has joined", False)]


def test_what_fails_and_who_waits() -> None:
    waits = Stuck("all_gather #3 of head", 2.5, (Absent(1, "10.0.0.1:7001", 2, "barrier"),))
    failed = {"all_gather": OpCounter(count=3, failed=2)}
    later = cluster(worker(0, stats(step=7, waiting=(waits,), collectives=failed)), TWO.jobs[0].workers[1])
    assert told(TWO, later, later) == [
        (f"rank 0 waits in all_gather #3 of head for {waits.absent[0]}", True),
        ("rank 0: 2 collectives have failed", True),
    ]


def test_a_job_that_begins_and_ends() -> None:
    none = replace(TWO, jobs=())
    finished = cluster(state="finished")
    assert told(none, TWO, finished, none) == [("job lm: running", False), ("job lm: finished", False), ("job lm is over", False)]


def test_a_job_whose_workers_have_vanished() -> None:
    assert told(TWO, cluster(state="lost")) == [
        ("job lm: lost (all workers are gone, and none had reported the end of the training)", True)
    ]


def test_who_was_lost_first_is_told_once() -> None:
    why = "epoch 1 lost rank 1 (10.0.0.1:7001) first: its disk is full"
    lost = cluster(worker(0, stats(step=7)), epoch=2, first_lost=why)
    assert told(TWO, lost, lost)[:2] == [("job lm: epoch 2 with 1 workers", False), (f"job lm: {why}", True)]
    assert [what for what, _ in told(TWO, lost, lost)].count(f"job lm: {why}") == 1


def test_the_rendezvous_goes_and_comes_back() -> None:
    assert told(TWO, replace(TWO, health="unreachable"), TWO) == [
        ("rendezvous 10.0.0.9:7000 is unreachable", True),
        ("rendezvous 10.0.0.9:7000 is serving", False),
    ]


def test_events_are_taken_once() -> None:
    chronicle = Chronicle()
    for view in (TWO, replace(TWO, health="unreachable")):
        chronicle.add(0.0, view)
    assert [len(chronicle.take_new()), len(chronicle.take_new()), len(chronicle.events)] == [1, 0, 1]
