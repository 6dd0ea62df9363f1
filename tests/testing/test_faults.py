"""Faults happen once, when they are due, to the rank that they are meant for; a run in which one did not happen fails."""

import time

import pytest
import torch

from shardnet.errors import UsageError
from shardnet.testing import ClusterRunner, Conditions, FaultNotFired, Faults, Kind, RanksFailed, same_bits
from tests.testing import training

both = pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])


@both
@pytest.mark.parametrize("after", ["step", "forward", "backward", "reduce_scatter"])
def test_a_killed_rank_is_lost_to_the_others(cluster: ClusterRunner, processes: bool, after: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        cluster.run(training.train, 3, processes=processes, faults=Faults().kill(rank=1, at_step=2, after=after))
    assert {(failure.rank, failure.kind) for failure in caught.value.failures} == {(0, "PeerLost"), (2, "PeerLost")}
    assert all("rank 1" in failure.message for failure in caught.value.failures)


@both
def test_an_elastic_run_goes_on_without_the_killed_and_with_who_joins(cluster: ClusterRunner, processes: bool) -> None:
    (expected,) = cluster.run(training.train, 1, args=(training.STEPS,))
    faults = Faults().kill(rank=1, at_step=2, after="backward").join(at_step=3)
    results = cluster.run(training.train_elastically, 3, elastic=True, processes=processes, faults=faults)
    assert results[1] is None
    ends = [result for result in results if result is not None]
    assert [(world_size, step) for world_size, step, _ in ends] == [(3, training.STEPS)] * 3
    for name, value in expected.items():
        assert all(same_bits(end[2][name], ends[0][2][name]) for end in ends)
        torch.testing.assert_close(ends[0][2][name], value)


def test_a_frozen_process_is_left_behind_and_comes_back(cluster: ClusterRunner) -> None:
    results = cluster.run(
        training.train_elastically,
        3,
        elastic=True,
        min_workers=3,  # so that the other two wait for it
        processes=True,
        faults=Faults().freeze(rank=1, at_step=2, seconds=4.0),
    )
    assert [(world_size, step) for world_size, step, _ in results] == [(3, training.STEPS)] * 3


@both
def test_a_delay_is_that_of_a_step(cluster: ClusterRunner, processes: bool) -> None:
    results = cluster.run(training.counts, 3, args=(4,), processes=processes, faults=Faults().delay(rank=2, at_step=2, seconds=1.0))
    assert [took_s[2] > 0.8 for took_s in results] == [True, True, False], "the others wait for it"
    assert all(took_s[3] < 0.8 for took_s in results)


@both
def test_a_slow_link_is_slow_from_then_on(cluster: ClusterRunner, processes: bool) -> None:
    faults = Faults().link(Conditions(latency_s=0.4), rank=1, at_step=2)
    results = cluster.run(training.counts, 2, args=(7,), processes=processes, faults=faults)
    # Ranks need not begin a step together: one that is behind finds the other one's data there, so not all five steps are slow.
    assert all(sum(took_s[2:]) > 0.7 for took_s in results), f"twice 0.4 s at least: {results}"
    assert all(min(took_s[:2]) < 0.4 for took_s in results), f"not yet: {results}"


@both
def test_broken_bytes_never_arrive_as_others(cluster: ClusterRunner, processes: bool) -> None:
    faults = Faults().harm(Kind.FLIP, rank=1, at_step=2, least_bytes=10_000)
    with pytest.raises(RanksFailed) as caught:
        cluster.run(training.counts, 2, args=(50,), processes=processes, faults=faults)
    assert {failure.kind for failure in caught.value.failures} <= {"PeerLost", "ProtocolError"}, str(caught.value)


@both
def test_who_is_cut_off_is_lost(cluster: ClusterRunner, processes: bool) -> None:
    with pytest.raises(RanksFailed) as caught:
        cluster.run(training.counts, 3, args=(500,), processes=processes, faults=Faults().cut(rank=2, at_step=2, seconds=1.0))
    assert {failure.kind for failure in caught.value.failures} == {"PeerLost"}, str(caught.value)


@both
def test_an_elastic_run_outlives_a_cut_of_a_second(cluster: ClusterRunner, processes: bool) -> None:
    """The worker that is cut off still reaches the rendezvous, so both try to form the next epoch until the link is whole."""
    faults = Faults().cut(rank=1, at_step=2, seconds=1.0)
    results = cluster.run(training.train_elastically, 2, elastic=True, min_workers=2, processes=processes, faults=faults)
    assert [(world_size, step) for world_size, step, _ in results] == [(2, training.STEPS)] * 2


def test_two_holds_are_over_when_the_longer_one_is(cluster: ClusterRunner) -> None:
    faults = Faults().hold(rank=1, at_step=2, seconds=0.8).hold(rank=1, at_step=2, seconds=0.1)
    results = cluster.run(training.counts, 2, args=(5,), faults=faults)
    assert any(sum(took_s[2:]) > 0.6 for took_s in results)


def test_who_is_to_join_when_all_is_over_is_an_error(cluster: ClusterRunner) -> None:
    with pytest.raises(FaultNotFired, match="came after the training had ended"):
        cluster.run(training.train_elastically, 3, elastic=True, faults=Faults().kill(rank=1, at_step=2).join(at_step=training.STEPS))


def test_who_hears_nothing_for_long_is_lost(cluster: ClusterRunner) -> None:
    begin_s = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        cluster.run(training.counts, 3, args=(10**6,), faults=Faults().hold(rank=2, at_step=2, seconds=30.0))
    assert {failure.kind for failure in caught.value.failures} == {"PeerLost"}, str(caught.value)
    assert time.monotonic() - begin_s < 20.0


def test_a_short_silence_is_nobodys_end(cluster: ClusterRunner) -> None:
    results = cluster.run(training.counts, 3, args=(4,), faults=Faults().hold(rank=2, at_step=2, seconds=0.5))
    assert any(took_s[2] > 0.4 for took_s in results)


@both
@pytest.mark.parametrize(
    ("faults", "due"),
    [
        (Faults().kill(rank=1, at_step=99), "kill rank 1 at step 99"),
        (Faults().delay(rank=0, at_step=1, seconds=0.0).cut(rank=1, at_step=50, seconds=2), "cut off rank 1 for 2 s at step 50"),
        (Faults().kill(rank=1, at_step=1, after="broadcast"), "kill rank 1 at step 1 after broadcast"),
    ],
)
def test_what_never_came_is_an_error(cluster: ClusterRunner, processes: bool, faults: Faults, due: str) -> None:
    with pytest.raises(FaultNotFired, match=rf"the run ended before these faults were due: {due} \(a step counts when"):
        cluster.run(training.counts, 2, args=(3,), processes=processes, faults=faults)


def test_a_harm_that_met_no_bytes_is_an_error(cluster: ClusterRunner) -> None:
    with pytest.raises(FaultNotFired, match=r"harm what is sent to rank 1 \(DROP\) at step 0: no block of 65000 bytes or more"):
        cluster.run(training.blocking, 2, faults=Faults().harm(Kind.DROP, rank=1, at_step=0, least_bytes=65_000))


def test_faults_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match=r"no worker can join at step 6 of rank 0, which is killed before; give join\(\) another rank"):
        Faults().kill(rank=0, at_step=5).join(at_step=6)
    with pytest.raises(UsageError, match="no worker can join at step 6 of rank 1"):
        Faults().join(rank=1, at_step=6).kill(rank=1, at_step=5)
    with pytest.raises(UsageError, match="must not be negative: kill rank -1"):
        Faults().kill(rank=-1, at_step=0)
    with pytest.raises(UsageError, match=r"after must be one of 'step', 'forward', .*, got 'al_gather'"):
        Faults().kill(rank=0, at_step=0, after="al_gather")
    with pytest.raises(UsageError, match="only kill and freeze can come after 'barrier'"):
        Faults().delay(rank=0, at_step=0, seconds=1.0, after="barrier")
