"""The membership state machine, without any I/O: each test is a history of joins, losses and ticks."""

from dataclasses import replace

import pytest

from shardnet.errors import JoinRefused, UsageError
from shardnet.rendezvous.events import JobState, Lost, Waiting
from shardnet.rendezvous.membership import Registry, RendezvousLimits
from shardnet.rendezvous.refusal import Refusal
from tests.rendezvous.builders import assigned, lost, to, waiting, worker

SETTLE_S = 2.0


@pytest.fixture
def registry() -> Registry:
    return Registry(settle_s=SETTLE_S)


def refusal(registry: Registry, number: int, **wish: object) -> JoinRefused:
    """Join, expecting a refusal that changes nothing."""
    before = registry.status(), registry.deadline()
    with pytest.raises(JoinRefused) as caught:
        registry.join(worker(number, **wish), now=0.0)  # type: ignore[arg-type]
    assert (registry.status(), registry.deadline()) == before
    return caught.value


class TestForming:
    def test_world_forms_at_once_when_the_maximum_is_there(self, registry: Registry) -> None:
        assert waiting(registry.join(worker(0), 0.0)) == {"w0": 1}
        worlds = assigned(registry.join(worker(1), 0.0))
        assert {name: (world.rank, world.epoch) for name, world in worlds.items()} == {"w0": (0, 1), "w1": (1, 1)}
        assert registry.status()[0].state is JobState.RUNNING

    def test_world_of_one_forms_at_once(self, registry: Registry) -> None:
        (world,) = assigned(registry.join(worker(0, least=1, most=1), 0.0)).values()
        assert (world.rank, world.world_size, world.me.address) == (0, 1, "10.0.0.1:7000")

    def test_everyone_is_told_how_many_are_there(self, registry: Registry) -> None:
        registry.join(worker(0, most=4), 0.0)
        notices = registry.join(worker(1, most=4), 0.0)
        assert to(notices, 0) == to(notices, 1) == [Waiting(2, 2, 4)]

    def test_minimum_waits_until_nobody_came_for_a_while(self, registry: Registry) -> None:
        registry.join(worker(0, most=4), 0.0)
        assert registry.deadline() is None  # below the minimum number of workers time does not count
        registry.join(worker(1, most=4), 10.0)
        assert registry.tick(11.9) == []
        registry.join(worker(2, most=4), 11.9)  # restarts the wait
        assert registry.deadline() == 13.9
        assert registry.tick(13.8) == []
        assert {world.world_size for world in assigned(registry.tick(13.9)).values()} == {3}
        assert registry.deadline() is None

    def test_tick_of_a_running_job_does_nothing(self, registry: Registry) -> None:
        registry.join(worker(0), 0.0)
        registry.join(worker(1), 0.0)
        assert registry.tick(1e9) == []

    def test_vanishing_frees_the_place_and_the_others_go_on(self, registry: Registry) -> None:
        registry.join(worker(0, least=3, most=3), 0.0)
        registry.join(worker(1, least=3, most=3), 0.0)
        assert waiting(registry.vanish("w0")) == {"w1": 1}
        registry.join(worker(2, least=3, most=3), 0.0)
        worlds = assigned(registry.join(worker(3, least=3, most=3), 0.0))
        assert {name: world.rank for name, world in worlds.items()} == {"w1": 0, "w2": 1, "w3": 2}

    def test_leaving_while_forming_is_told_as_waiting(self, registry: Registry) -> None:
        registry.join(worker(0, least=3, most=3), 0.0)
        registry.join(worker(1, least=3, most=3), 0.0)
        assert waiting(registry.leave("job", "w1")) == {"w0": 1}

    def test_vanishing_below_the_minimum_stops_the_wait(self, registry: Registry) -> None:
        registry.join(worker(0, most=4), 0.0)
        registry.join(worker(1, most=4), 0.0)
        registry.vanish("w1")
        assert registry.deadline() is None
        assert registry.tick(100.0) == []

    def test_job_that_everyone_left_before_it_formed_is_forgotten(self, registry: Registry) -> None:
        registry.join(worker(0), 0.0)
        assert registry.vanish("w0") == []
        assert registry.status() == ()
        registry.join(worker(1, least=3, most=5), 0.0)  # another wish: the old one does not bind
        assert waiting(registry.join(worker(2, least=3, most=5), 0.0)) == {"w1": 2, "w2": 2}

    def test_restart_takes_the_address_once_the_old_one_is_gone(self, registry: Registry) -> None:
        registry.join(worker(0), 0.0)
        assert refusal(registry, 1, address="10.0.0.1:7000").reason == Refusal.DUPLICATE_ADDRESS
        registry.vanish("w0")
        registry.join(worker(1, address="10.0.0.1:7000"), 0.0)
        worlds = assigned(registry.join(worker(2), 0.0))
        assert [m.incarnation for m in worlds["w1"].members] == ["w1", "w2"]

    def test_jobs_do_not_mix(self, registry: Registry) -> None:
        registry.join(worker(0, job="one"), 0.0)
        registry.join(worker(1, job="two", address="10.0.0.1:7000"), 0.0)
        assert set(assigned(registry.join(worker(2, job="one"), 0.0))) == {"w0", "w2"}
        assert [(s.job, s.state) for s in registry.status()] == [("one", JobState.RUNNING), ("two", JobState.FORMING)]

    def test_earliest_job_decides_the_deadline(self, registry: Registry) -> None:
        registry.join(worker(0, least=1, job="late"), 5.0)
        registry.join(worker(1, least=1, job="early"), 3.0)
        assert registry.deadline() == 5.0
        assert set(assigned(registry.tick(5.0))) == {"w1"}
        assert registry.deadline() == 7.0


class TestRunning:
    @pytest.fixture
    def running(self, registry: Registry) -> Registry:
        """Three of at most four workers run, in epoch 1."""
        for number in range(3):
            registry.join(worker(number, most=4), 0.0)
        registry.tick(SETTLE_S)
        return registry

    def test_vanishing_is_told_to_the_others(self, running: Registry) -> None:
        notices = running.vanish("w1")
        assert lost(notices) == {"w0": (1, False), "w2": (1, False)}
        (event,) = to(notices, 0)
        assert isinstance(event, Lost)
        assert (event.epoch, event.reason) == (1, "its connection to the rendezvous broke")

    def test_a_failure_is_told_with_its_reason_and_once(self, running: Registry) -> None:
        notices = running.fail("job", "w1", "its disk is full")
        assert lost(notices) == {"w0": (1, False), "w2": (1, False)}
        assert [event.reason for event in to(notices, 0) if isinstance(event, Lost)] == ["its disk is full"]
        assert running.vanish("w1") == []  # its stream ends after it
        assert running.fail("job", "w1", "its disk is full") == []
        assert running.fail("other", "w0", "its disk is full") == []

    def test_the_first_loss_is_remembered(self, running: Registry) -> None:
        assert running.status()[0].first_lost == ""
        running.fail("job", "w1", "it lost w2", follows=True)
        assert running.status()[0].first_lost == "epoch 1 lost rank 1 (10.0.0.1:7001) first: it lost w2"
        running.fail("job", "w2", "its disk is full")  # it was heard of later
        running.fail("job", "w0", "it had another reason")
        (status,) = running.status()
        assert (status.state, status.first_lost) == (JobState.LOST, "epoch 1 lost rank 2 (10.0.0.1:7002) first: its disk is full")

    def test_and_forgotten_for_one_of_a_later_epoch(self, running: Registry) -> None:
        for number in range(3):
            running.vanish(f"w{number}")
        assert set(assigned([*running.join(worker(5), 10.0), *running.join(worker(6), 10.0)])) == {"w5", "w6"}
        assert "epoch 1 lost rank 0" in running.status()[0].first_lost
        running.fail("job", "w6", "it lost w5", follows=True)
        assert running.status()[0].first_lost == "epoch 2 lost rank 1 (10.0.0.1:7006) first: it lost w5"

    def test_one_that_was_only_cut_off_was_not_lost(self, running: Registry) -> None:
        running.vanish("w1")
        running.resume(replace(worker(1, most=4), resumes=True))
        assert running.status()[0].first_lost == ""

    def test_and_hides_no_other_that_was(self, running: Registry) -> None:
        running.vanish("w1")
        running.fail("job", "w2", "its disk is full")
        running.resume(replace(worker(1, most=4), resumes=True))
        assert running.status()[0].first_lost == "epoch 1 lost rank 2 (10.0.0.1:7002) first: its disk is full"

    def test_leaving_is_told_as_a_goodbye_and_once(self, running: Registry) -> None:
        assert lost(running.leave("job", "w2")) == {"w0": (2, True), "w1": (2, True)}
        assert running.vanish("w2") == []  # its stream ends after the goodbye
        assert running.leave("job", "w2") == []

    def test_ranks_of_the_others_stay(self, running: Registry) -> None:
        running.vanish("w0")
        assert lost(running.vanish("w2")) == {"w1": (2, False)}
        (status,) = running.status("job")
        assert [(m.rank, m.incarnation) for m in status.members] == [(1, "w1")]

    def test_leaving_another_job_does_nothing(self, running: Registry) -> None:
        assert running.leave("other", "w0") == []
        assert running.leave("job", "nobody") == []
        assert running.status()[0].joined == 3

    def test_finished_when_all_are_gone_and_formed_anew_as_the_next_epoch(self, running: Registry) -> None:
        running.leave("job", "w0")
        running.vanish("w1")
        assert running.leave("job", "w2") == []
        (status,) = running.status()
        assert (status.state, status.epoch, status.joined, status.members) == (JobState.FINISHED, 1, 0, ())
        running.join(worker(5), 10.0)
        assert running.status()[0].state is JobState.FORMING
        assert {world.epoch for world in assigned(running.join(worker(6), 10.0)).values()} == {2}

    def test_forming_that_fails_keeps_the_epoch(self, running: Registry) -> None:
        for number in range(3):
            running.vanish(f"w{number}")
        running.join(worker(5), 10.0)
        running.vanish("w5")
        (status,) = running.status()
        assert (status.state, status.epoch) == (JobState.LOST, 1)

    def test_who_has_vanished_has_not_finished(self, running: Registry) -> None:
        running.leave("job", "w0")
        running.vanish("w1")
        running.vanish("w2")
        assert running.status()[0].state is JobState.LOST
        for number in (5, 6):
            running.join(worker(number), 10.0)
        assert running.status()[0].state is JobState.RUNNING
        for number in (5, 6):
            running.leave("job", f"w{number}")
        assert running.status()[0].state is JobState.FINISHED


class TestRefusals:
    """They say what is wrong, where, and what to do; the second worker never harms the first."""

    def test_duplicate_incarnation_even_in_another_job(self, registry: Registry) -> None:
        registry.join(worker(0), 0.0)
        error = refusal(registry, 0, job="other", address="10.0.0.9:1")
        assert error.reason == Refusal.DUPLICATE_INCARNATION
        assert "'w0' is a member of job 'job' already" in str(error)

    def test_duplicate_address_never_overwrites(self, registry: Registry) -> None:
        registry.join(worker(0, node="first"), 0.0)
        error = refusal(registry, 1, address="10.0.0.1:7000", node="second")
        assert error.reason == Refusal.DUPLICATE_ADDRESS
        assert str(error).startswith(
            "10.0.0.1:7000 already belongs to a live worker of job 'job' on node first; give this worker another port"
        )
        worlds = assigned(registry.join(worker(2), 0.0))
        assert [m.incarnation for m in worlds["w0"].members] == ["w0", "w2"]

    @pytest.mark.parametrize("first", ["localhost:7000", "[::1]:7000", "[0:0::1]:7000"])
    def test_one_address_spelled_in_two_ways_is_one_address(self, registry: Registry, first: str) -> None:
        registry.join(worker(0, address=first), 0.0)
        second = "LOCALHOST:7000" if "local" in first else "[0000:0:0:0:0:0:0:1]:7000"
        assert refusal(registry, 1, address=second).reason == Refusal.DUPLICATE_ADDRESS

    def test_duplicate_address_while_running(self, registry: Registry) -> None:
        registry.join(worker(0), 0.0)
        registry.join(worker(1), 0.0)
        assert refusal(registry, 2, address="10.0.0.1:7001").reason == Refusal.DUPLICATE_ADDRESS

    @pytest.mark.parametrize(("least", "most", "wish"), [(1, 2, "1 to 2"), (2, 3, "2 to 3"), (3, 3, "3")])
    def test_contradicting_wish(self, registry: Registry, least: int, most: int, wish: str) -> None:
        registry.join(worker(0), 0.0)
        error = refusal(registry, 1, least=least, most=most)
        assert error.reason == Refusal.WISH
        assert f"10.0.0.1:7001 asks for {wish} workers, but job 'job' was started with 2 by 10.0.0.1:7000" in str(error)

    def test_full(self, registry: Registry) -> None:
        registry.join(worker(0), 0.0)
        registry.join(worker(1), 0.0)
        error = refusal(registry, 2)
        assert error.reason == Refusal.FULL
        assert "job 'job' is full: 2 of 2 workers run; use another job id" in str(error)

    def test_late(self, registry: Registry) -> None:
        registry.join(worker(0, most=4), 0.0)
        registry.join(worker(1, most=4), 0.0)
        registry.tick(SETTLE_S)
        error = refusal(registry, 2, most=4)
        assert error.reason == Refusal.RUNNING
        assert "is already running (epoch 1, 2 of at most 4 workers), and a worker can join a running job only if both are elastic" in str(
            error
        )

    def test_replacement_of_a_lost_member_is_late_too(self, registry: Registry) -> None:
        registry.join(worker(0), 0.0)
        registry.join(worker(1), 0.0)
        registry.vanish("w1")
        assert refusal(registry, 2).reason == Refusal.RUNNING


class TestLimits:
    def test_too_many_members(self) -> None:
        registry = Registry(limits=RendezvousLimits(max_members=3))
        for number in range(3):
            registry.join(worker(number, least=2, most=2 if number < 2 else 3, job="a" if number < 2 else "b"), 0.0)
        error = refusal(registry, 3, most=3, job="b")
        assert error.reason == Refusal.FULL
        assert "this rendezvous already has 3 workers, which is its maximum" in str(error)
        registry.leave("a", "w0")
        registry.join(worker(3, most=3, job="b"), 0.0)

    def test_full_but_for_a_worker_that_has_its_place_already(self) -> None:
        registry = Registry(limits=RendezvousLimits(max_members=2))
        for number in range(2):
            registry.join(replace(worker(number), elastic=True), 0.0)
        for previous in ("", "w0"):  # another worker's
            with pytest.raises(JoinRefused, match="already has 2 workers"):
                registry.join(replace(worker(2), elastic=True, previous=previous), 1.0)
        for number in range(2):
            notices = registry.join(replace(worker(number), elastic=True, incarnation=f"w{number}+", previous=f"w{number}"), 1.0)
        assert assigned(notices).keys() == {"w0+", "w1+"}

    def test_wish_beyond_what_the_rendezvous_takes(self) -> None:
        registry = Registry(limits=RendezvousLimits(max_members=3))
        assert "asks for 2 to 4 workers, but this rendezvous takes at most 3" in str(refusal(registry, 0, most=4))

    def test_too_many_jobs(self) -> None:
        registry = Registry(limits=RendezvousLimits(max_jobs=2))
        registry.join(worker(0, job="a"), 0.0)
        registry.join(worker(1, job="b"), 0.0)
        error = refusal(registry, 2, job="c")
        assert error.reason == Refusal.FULL
        assert "has 2 unfinished jobs" in str(error)

    def test_oldest_finished_job_makes_room_but_its_epochs_are_not_given_again(self) -> None:
        registry = Registry(limits=RendezvousLimits(max_jobs=2))
        for job, number in [("a", 0), ("a", 1), ("b", 2)]:
            registry.join(worker(number, least=1, most=1, job=job), 0.0)
            registry.leave(job, f"w{number}")
        registry.join(worker(3, least=1, most=1, job="c"), 0.0)
        assert [s.job for s in registry.status()] == ["b", "c"]
        registry.leave("c", "w3")
        (world,) = assigned(registry.join(worker(4, least=1, most=1, job="a"), 0.0)).values()
        assert world.epoch > 2  # job a ran as epochs 1 and 2, and a straggler of these may still be about

    @pytest.mark.parametrize("limits", [{"max_jobs": 0}, {"max_members": 0}])
    def test_limits_must_be_positive(self, limits: dict[str, int]) -> None:
        with pytest.raises(UsageError, match="at least 1"):
            RendezvousLimits(**limits)


def test_status_of_one_job_or_all(registry: Registry) -> None:
    registry.join(worker(0, job="a", least=1, most=3), 0.0)
    registry.join(worker(1, job="b", least=2, most=2), 0.0)
    (status,) = registry.status("b")
    assert (status.state, status.epoch, status.joined, status.min_world_size, status.max_world_size) == (JobState.FORMING, 0, 1, 2, 2)
    assert status.members == ()
    assert [s.job for s in registry.status()] == ["a", "b"]
    assert registry.status("c") == ()
