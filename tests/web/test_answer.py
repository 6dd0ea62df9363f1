"""What the page is told about made-up looks at a cluster."""

import json
import math
from dataclasses import replace
from typing import Any

from shardnet.histogram import Histogram
from shardnet.observation.views import ClusterView, Steps, Stuck
from shardnet.telemetry import Progress
from shardnet.traffic import Traffic
from shardnet.waiting import Absent
from shardnet.web.answer import VERSION, answer
from shardnet.web.story import Story
from tests.observation.views import RENDEZVOUS, cluster, stats, worker


def story_of(*views: ClusterView) -> Story:
    story = Story()
    for second, view in enumerate(views):
        story.add(1e9 + second, float(second), view)
    return story


def sample(second: int, *, loss: float = 2.5) -> ClusterView:
    """Four workers on two nodes; rank 3 is late, and rank 2 has died."""
    workers = []
    for rank in (0, 1, 3):
        peers = {
            peer: Traffic(1000 * second if peer // 2 != rank // 2 else 0, 500 * second if peer // 2 == rank // 2 else 0)
            for peer in range(4)
        }
        del peers[rank]
        said = stats(
            rank=rank,
            step=10 * second,
            uptime_s=second,
            progress=Progress(10 * second, 400, loss=loss, tokens_per_s=1234.5678, note="warm"),
            steps=Steps(Histogram([10 * second, *[0] * 18]), second, 0.25 * second),
            exposed_s=0.25 * second,
            peers=peers,
            bytes_sent=2500 * second,
            bytes_received=2500 * second,
            resident_bytes=1 << 30,
            late={3: 0.5 * second} if rank != 3 else {},
            nodes=("node-0/boot", "node-2/boot"),
            node_groups=(0, 0, 1, 1),
        )
        workers.append(replace(worker(rank, said), node=f"node-{rank // 2 * 2}/boot"))
    return cluster(*workers[:2], replace(worker(2, state="gone"), node=""), workers[2], joined=4)


def job_of(story: Story, **asked: Any) -> dict[str, Any]:
    found: dict[str, Any] = answer(story, **asked)["job"]
    return found


def test_before_the_first_look_and_without_jobs() -> None:
    assert answer(Story())["rendezvous"] is None
    told = answer(story_of(ClusterView("10.0.0.9:7000", "serving", RENDEZVOUS)))
    assert (told["version"], told["number"], told["jobs"], told["job"]) == (VERSION, 1, [], None)
    assert told["rendezvous"] == {
        "address": "10.0.0.9:7000",
        "health": "serving",
        "version": "1",
        "connections": "plaintext",
        "uptime_s": 9,
    }


def test_a_job() -> None:
    job = job_of(story_of(*map(sample, range(3))))
    assert (job["name"], job["state"], job["epoch"], job["joined"], job["wanted"]) == ("lm", "running", 1, 4, [1, 4])
    assert job["nodes"] == ["node-0", "node-2"]
    assert [(each["rank"], each["node"], each["state"]) for each in job["workers"]] == [
        (0, 0, "serving"),
        (1, 0, "serving"),
        (2, 1, "gone"),
        (3, 1, "serving"),
    ], "of who is gone the others know the node"
    progress = {"step": 20, "total_steps": 400, "loss": 2.5, "tokens_per_s": 1234.6, "step_s": 0.1, "left_s": 38.0, "note": "warm"}
    assert job["progress"] == progress
    assert (job["network"], job["memory"]) == (6000.0, 1500.0)
    first, _, dead, late = job["workers"]
    assert first["to"] == [[1, 0.0, 500.0], [2, 1000.0, 0.0], [3, 1000.0, 0.0]]
    assert (first["step"], first["step_s"], first["wait"], first["sent"], first["resident_bytes"]) == (20, 0.1, 0.25, 2500.0, 1 << 30)
    assert (late["late_share"], first["late_share"]) == (0.5, 0.0)
    assert "step" not in dead
    assert [each["late"] for each in job["workers"]] == [False, False, False, True]


def test_waiting_that_was_not_measured_is_null() -> None:
    said = stats(progress=Progress(10, 400, 2.5, tokens_per_s=1234.5))
    assert job_of(story_of(cluster(worker(0, said))))["workers"][0]["wait"] is None


def test_late_is_who_is_waited_for_more_than_the_rest() -> None:
    """For example on a machine with fewer cores than workers, where all workers wait for each other."""

    def crowded(second: int, share: float) -> ClusterView:
        late = {rank: share * second if rank == 1 else 0.3 * second for rank in range(4)}
        return cluster(*(worker(rank, stats(uptime_s=second, late=late)) for rank in range(4)))

    for share, marked in ((0.4, []), (0.8, [1])):
        job = job_of(story_of(*(crowded(second, share) for second in range(3))))
        assert [each["rank"] for each in job["workers"] if each["late"]] == marked


def test_the_story_of_a_job_is_told_once() -> None:
    story = story_of(*map(sample, range(3)))
    whole = answer(story, "lm")
    assert (whole["since"], len(whole["job"]["points"])) == (None, 3)
    assert [len(rates) for rates in whole["job"]["recent"].values()] == [3, 3, 0, 3]
    point = dict(zip(whole["job"]["columns"], whole["job"]["points"][-1], strict=True))
    assert (point["number"], point["at_s"], point["step"], point["network"]) == (3, 1e9 + 2, 20, 6000.0)
    later = answer(story, "lm", since=2)
    assert (later["since"], [row[0] for row in later["job"]["points"]], later["job"]["recent"]) == (2, [3], None)
    assert answer(story, "lm", since=3)["job"]["points"] == []
    strange: tuple[dict[str, Any], ...] = ({"job": "other", "since": 2}, {"since": 2}, {"job": "lm", "since": 99})
    for asked in strange:
        assert (told := answer(story, **asked))["since"] is None, asked
        assert len(told["job"]["points"]) == 3


def test_which_job_is_told_of() -> None:
    (job,) = sample(1).jobs
    jobs = [
        replace(job, job=name, state=state) for name, state in (("a", "running"), ("b", "running"), ("c", "forming"), ("d", "finished"))
    ]
    story = story_of(replace(sample(1), jobs=tuple(jobs)))
    assert job_of(story)["name"] == "b", "the newest of those that run"
    assert job_of(story, job="d")["name"] == "d"
    assert job_of(story, job="gone")["name"] == "b"
    assert [(each["name"], each["state"], each["workers"]) for each in answer(story)["jobs"]] == [
        ("a", "running", 3),
        ("b", "running", 3),
        ("c", "forming", 3),
        ("d", "finished", 3),
    ]


def test_a_job_that_is_over_says_how_far_it_came() -> None:
    dying = cluster(worker(0, state="unreachable"))
    job = job_of(story_of(sample(0), sample(1), dying, cluster(state="finished", epoch=1)))
    assert (job["workers"], job["progress"]) == ([], {"step": 10, "total_steps": None, "loss": 2.5, "note": ""})


def test_what_no_number_is_is_null() -> None:
    told = answer(story_of(sample(0, loss=math.nan), sample(1, loss=math.inf)))
    assert told["job"]["progress"]["loss"] is None
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_who_waits_for_whom() -> None:
    waits = Stuck("all_gather #3 of head", 2.5, (Absent(1, "10.0.0.1:7001", 2, "barrier"),))
    first, second = job_of(story_of(cluster(worker(0, stats(waiting=(waits,))), worker(1, stats()))))["workers"]
    assert first["stuck"] == [f"all_gather #3 of head for {waits.absent[0]}"]
    assert (first["late"], second["late"]) == (False, True)


def test_sixteen_workers_are_told_of_in_few_bytes() -> None:
    def many(second: int) -> ClusterView:
        peers = {peer: Traffic(123_456_789 * second, 987_654_321 * second) for peer in range(16)}
        said = stats(
            step=second, uptime_s=second, progress=Progress(second, 400, 2.3456789, 45_678.9, 0.123456), peers=peers, bytes_sent=second
        )
        return cluster(*(worker(rank, said) for rank in range(16)))

    story = story_of(*map(many, range(1000)))
    assert len(json.dumps(answer(story, "lm", since=999), separators=(",", ":"))) < 16_000
    assert len(json.dumps(answer(story), separators=(",", ":"))) < 128_000
