"""The next epoch of an elastic job: what workers are told, when it forms, and with which workers."""

import asyncio
from dataclasses import replace

import pytest

from shardnet.config import Timeouts
from shardnet.errors import JoinRefused, JoinTimeout, RendezvousUnavailable
from shardnet.rendezvous import joining
from shardnet.rendezvous.client import Membership, join
from shardnet.rendezvous.events import Ended, Event, JobState, Joiners, Lost, Waiting
from shardnet.rendezvous.lease import Lease
from shardnet.rendezvous.membership import LEFT, Registry
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from tests.rendezvous.builders import SETTLE, again, assigned, elastic, formed, joiners, lost, to, worker
from tests.rendezvous.people import SETTLE_S, Person, rendezvous


@pytest.fixture
def registry() -> Registry:
    return Registry(settle_s=SETTLE)


def test_survivors_form_the_next_epoch_when_the_last_of_them_has_come(registry: Registry) -> None:
    workers = formed(registry, 4)
    assert lost(registry.vanish("w1")) == {"w0": (1, False), "w2": (1, False), "w3": (1, False)}
    first = registry.join(again(workers[3]), 10.0)
    assert not assigned(first)
    assert lost(first) == {"w0": (3, True), "w2": (3, True)}
    assert not assigned(registry.join(again(workers[0]), 10.1))
    worlds = assigned(registry.join(again(workers[2]), 10.2))
    assert {name: (world.epoch, world.rank) for name, world in worlds.items()} == {"w0+": (2, 0), "w2+": (2, 1), "w3+": (2, 2)}


def test_the_first_epoch_may_be_of_a_size_of_its_own() -> None:
    registry = Registry(settle_s=SETTLE, first_world_size=3)
    for number in range(2):
        registry.join(elastic(number), 0.0)
    assert registry.deadline() is None
    assert len(assigned(registry.join(elastic(2), 100.0))) == 3
    registry.join(elastic(3), 101.0)
    for number in range(3):
        notices = registry.join(again(elastic(number)), 102.0)
    assert len(assigned(notices)) == 4


def test_a_member_that_dies_is_not_waited_for(registry: Registry) -> None:
    workers = formed(registry, 4)
    registry.vanish("w1")
    for number in (0, 2):
        assert not assigned(registry.join(again(workers[number]), 10.0))
    assert set(assigned(registry.vanish("w3"))) == {"w0+", "w2+"}


def test_with_fewer_than_the_minimum_they_wait_for_others(registry: Registry) -> None:
    workers = formed(registry, 2)
    registry.vanish("w1")
    notices = registry.join(again(workers[0]), 10.0)
    assert to(notices, 0) == []
    assert [n.event for n in notices if n.to == "w0+"] == [Waiting(1, 2, 4)]
    assert registry.status()[0].state is JobState.FORMING
    assert not assigned(registry.join(elastic(7), 20.0))  # enough, but more may come
    assert {name: world.epoch for name, world in assigned(registry.tick(20.0 + SETTLE)).items()} == {"w0+": 2, "w7": 2}


def test_members_hear_of_joiners_that_there_is_room_for(registry: Registry) -> None:
    formed(registry, 3)
    notices = registry.join(elastic(7), 10.0)
    assert joiners(notices) == {"w0": 1, "w1": 1, "w2": 1}
    assert to(notices, 7) == [Waiting(4, 2, 4, is_running=True)]
    assert set(joiners(registry.join(elastic(8), 10.0)).values()) == {1}
    assert joiners(registry.vanish("w1")) == {"w0": 2, "w2": 2}
    assert joiners(registry.vanish("w8")) == {"w0": 1, "w2": 1}


def test_spares_wait_until_there_is_room_and_come_behind_the_members(registry: Registry) -> None:
    workers = formed(registry, 4)
    for spares, number in enumerate((7, 8), start=1):
        notices = registry.join(elastic(number), 10.0)
        assert [to(notices, member) for member in range(4)] == [[Joiners(0, spares)]] * 4
    registry.vanish("w0")
    registry.join(again(workers[1]), 11.0)
    registry.join(again(workers[2]), 11.0)
    notices = registry.join(again(workers[3]), 11.0)
    assert {name: world.rank for name, world in assigned(notices).items()} == {"w1+": 0, "w2+": 1, "w3+": 2, "w7": 3}
    assert registry.status()[0].joined == 5
    assert registry.is_member("w8")


def test_the_workers_of_a_job_that_has_ended_do_not_count(registry: Registry) -> None:
    formed(registry, 2)
    registry.leave("job", "w0")
    registry.leave("job", "w1")
    assert registry.status()[0].state is JobState.FINISHED
    registry.join(elastic(5), 10.0)
    assert {world.epoch for world in assigned(registry.join(elastic(6), 10.0) + registry.tick(10.0 + SETTLE)).values()} == {2}


def test_when_members_leave_in_peace_the_training_is_over_for_who_waits_and_who_comes_back(registry: Registry) -> None:
    workers = formed(registry, 3)
    registry.join(elastic(7), 10.0)
    notices = registry.leave("job", "w0")
    assert to(notices, 7) == [Ended()]
    assert not registry.is_member("w7")
    assert to(notices, 1) == [Lost(1, 0, LEFT, True), Joiners(0)]
    registry.vanish("w2")
    for late in (again(workers[1]), elastic(8)):
        with pytest.raises(JoinRefused, match="the training of job 'job' has ended") as refused:
            registry.join(late, 11.0)
        assert refused.value.reason == Refusal.ENDED
    registry.vanish("w1")
    assert registry.status()[0].state is JobState.FINISHED
    for late in (replace(elastic(9), replacement=True), again(workers[2])):  # a worker that was frozen comes when nobody is left
        with pytest.raises(JoinRefused) as refused:
            registry.join(late, 12.0)
        assert refused.value.reason == Refusal.ENDED
    registry.join(elastic(9), 12.0)
    registry.join(replace(elastic(10), replacement=True), 12.0)
    assert set(assigned(registry.tick(12.0 + SETTLE))) == {"w9", "w10"}


def test_a_training_whose_last_survivors_give_up_is_lost(registry: Registry) -> None:
    """They wait for the next epoch, without ranks; nobody has said that the training was over."""
    _, second = formed(registry, 2)
    registry.vanish("w0")
    registry.join(again(second), 10.0)
    registry.vanish("w1+")
    (status,) = registry.status()
    assert (status.state, status.epoch) == (JobState.LOST, 1)
    assert status.first_lost.startswith("epoch 1 lost rank 0")
    for number in (5, 6):
        registry.join(elastic(number), 20.0)
    assert set(assigned(registry.tick(20.0 + SETTLE))) == {"w5", "w6"}
    for number in (5, 6):
        registry.leave("job", f"w{number}")
    assert registry.status()[0].state is JobState.FINISHED


def test_a_training_that_has_ended_is_not_lost_because_another_one_did_not_begin(registry: Registry) -> None:
    _, second = formed(registry, 2)
    registry.leave("job", "w0")
    registry.vanish("w1")
    registry.join(elastic(7), 10.0)
    registry.vanish("w7")  # gives up before there are enough
    with pytest.raises(JoinRefused) as refused:
        registry.resume(second)  # to an epoch that was over before w7 came
    assert refused.value.reason == Refusal.UNKNOWN
    assert registry.status()[0].state is JobState.FINISHED


def test_it_is_done_when_the_last_one_has_left_in_peace(registry: Registry) -> None:
    first, second = formed(registry, 2)
    done = [registry.is_done]
    registry.leave(first.job, first.incarnation)
    done.append(registry.is_done)
    registry.vanish(second.incarnation)  # it had come to the end as well, and dies as it leaves
    done.append(registry.is_done)
    registry.join(elastic(7), 10.0)
    done.append(registry.is_done)
    assert done == [False, False, True, False]


def test_it_is_not_done_when_all_are_lost_or_were_none(registry: Registry) -> None:
    for request in formed(registry, 2):
        registry.vanish(request.incarnation)
    waiting = elastic(7)
    registry.join(waiting, 10.0)
    registry.leave(waiting.job, waiting.incarnation)  # it gives up, and was never a member
    assert not registry.is_done


def test_nobody_is_taken_for_another_ones_successor(registry: Registry) -> None:
    formed(registry, 3)
    stranger = replace(elastic(9), previous="w0")
    assert not lost(registry.join(stranger, 10.0))
    assert registry.is_member("w0")
    other_job = replace(elastic(5), job="other", previous="w0", address="10.0.0.1:7000")
    registry.join(other_job, 10.0)
    assert registry.is_member("w0")


def test_a_successor_needs_the_same_certificate(registry: Registry) -> None:
    one, two = (replace(elastic(number, most=2), identity="shardnet:worker:job:one", local_rank_hint=number) for number in range(2))
    registry.join(one, 0.0)
    registry.join(two, 0.0)
    with pytest.raises(JoinRefused) as refused:
        registry.join(replace(again(one), identity="shardnet:worker:job:two"), 1.0)
    assert refused.value.reason == Refusal.IDENTITY
    assert registry.is_member("w0")


def test_epochs_grow_even_where_the_rendezvous_has_forgotten_them(registry: Registry) -> None:
    registry.join(replace(elastic(0, most=2), previous="gone", last_epoch=41), 0.0)
    assert {world.epoch for world in assigned(registry.join(elastic(1, most=2), 0.0)).values()} == {42}


def test_a_running_job_that_is_not_elastic_takes_nobody(registry: Registry) -> None:
    for number in range(2):
        registry.join(worker(number), 0.0)
    for request in (worker(5), elastic(5, most=2), replace(worker(5), previous="w0", address="10.0.0.1:7000")):
        with pytest.raises(JoinRefused) as refused:
            registry.join(request, 1.0)
        assert refused.value.reason in (Refusal.FULL, Refusal.RUNNING)


def test_an_elastic_job_has_elastic_workers_only(registry: Registry) -> None:
    registry.join(elastic(0), 0.0)
    with pytest.raises(JoinRefused, match="asks for 2 to 4 workers, but job 'job' was started with 2 to 4 elastic"):
        registry.join(worker(1, least=2, most=4), 0.0)


# --- over gRPC


async def test_survivors_meet_again() -> None:
    async with rendezvous() as server:
        people = [Person(server.address, elastic(number, least=1, most=3)) for number in range(3)]
        memberships = [await person.joined for person in people]
        assert [membership.topology.epoch for membership in memberships] == [1, 1, 1]
        places = {membership.topology.rank: (person, membership) for person, membership in zip(people, memberships, strict=True)}
        await places[1][0].die()
        for rank in (0, 2):
            assert await places[rank][0].lost.get() == (1, "its connection to the rendezvous broke", False)
        successors = [Person(server.address, again(_request(places[rank][1]))) for rank in (0, 2)]
        worlds = [(await person.joined).topology for person in successors]
        assert [(world.epoch, world.rank, world.world_size) for world in worlds] == [(2, 0, 2), (2, 1, 2)]
        for person in (*(places[rank][0] for rank in (0, 2)), *successors):
            await person.leave()


async def test_members_are_told_over_the_wire_that_somebody_waits() -> None:
    async with rendezvous(settle_s=SETTLE_S) as server:
        member = Person(server.address, elastic(0, least=1, most=2))
        membership = await member.joined
        assert membership.joiners == 0
        waiting = Person(server.address, elastic(1, least=1, most=2))
        await waiting.arrived.wait()
        assert await waiting.waiting.get() == Waiting(2, 1, 2, is_running=True)
        successor = Person(server.address, again(_request(membership)))
        worlds = [(await person.joined).topology for person in (successor, waiting)]
        assert [(world.epoch, world.rank) for world in worlds] == [(2, 0), (2, 1)]
        assert membership.joiners == 1
        for person in (member, successor, waiting):
            await person.leave()


async def test_a_restart_waits_until_the_rendezvous_has_seen_the_end_of_the_one_before() -> None:
    async with rendezvous() as server:
        first = Person(server.address, elastic(0, least=1, most=2))
        await first.joined
        second = Person(server.address, replace(elastic(1, least=1, most=2), address="10.0.0.1:7000"))
        third = Person(server.address, elastic(2, least=1, most=2))
        await third.arrived.wait()
        assert not second.arrived.is_set()
        await first.die()
        assert await third.rank() == 0
        await second.arrived.wait()
        assert await second.waiting.get() == Waiting(2, 1, 2, is_running=True)
        await third.die()
        assert await second.rank() == 0
        await second.leave()


async def test_a_spare_is_told_that_it_waits_for_a_place(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that others are missing, which are all there."""
    monkeypatch.setattr("shardnet.rendezvous.joining.PATIENCE_S", 0.2)
    async with rendezvous(settle_s=SETTLE_S) as server:
        member = Person(server.address, elastic(0, least=1, most=1))
        await member.joined
        spare = join(server.address, elastic(1, least=1, most=1), timeouts=replace(Timeouts.for_tests(), join_s=1.0))
        with pytest.raises(JoinTimeout, match=r"has all of its 1 elastic worker.*and no place became free within 1 s"):
            await spare.__aenter__()
        await member.leave()
    assert "job 'job' has all of its 1 elastic worker" in caplog.text


async def test_a_spare_is_told_when_it_waits_for_workers_and_no_longer_for_a_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardnet.rendezvous.joining.PATIENCE_S", 0.2)
    async with rendezvous(settle_s=SETTLE_S) as server:
        members = [Person(server.address, elastic(number, least=2, most=2)) for number in range(2)]
        for member in members:
            await member.joined
        spare = Person(server.address, elastic(2, least=2, most=2))
        while "has all of its 2 elastic workers; this one waits for a place" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for member in members:
            await member.die()
        while (await spare.waiting.get()).is_full:
            pass
        assert caplog.messages[-1].startswith("job 'job': 1 of 2 elastic workers have joined at ")
        await spare.die()


async def test_who_waits_for_the_end_of_an_epoch_is_told_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that workers must be started, or that all have joined. First a newcomer, then a member that has left the epoch."""
    monkeypatch.setattr("shardnet.rendezvous.joining.PATIENCE_S", 0.2)
    timeouts = replace(Timeouts.for_tests(), join_s=1.0)
    async with rendezvous(settle_s=SETTLE_S) as server:
        members = [Person(server.address, elastic(number, least=1, most=3)) for number in range(2)]
        memberships = [await member.joined for member in members]
        caplog.clear()
        with pytest.raises(JoinTimeout, match=rf"is running at {server.address}, and its workers did not end their epoch within 1 s"):
            await join(server.address, elastic(2, least=1, most=3), timeouts=timeouts).__aenter__()
        (said,) = [record.getMessage() for record in caplog.records if record.name == "shardnet.rendezvous.joining"]
        assert said == f"job 'job' is running at {server.address}; waiting up to 1 s until it takes this worker in, after a step"
        caplog.clear()
        with pytest.raises(JoinTimeout, match="did not end their epoch within 1 s"):
            await join(server.address, again(_request(memberships[0])), timeouts=timeouts).__aenter__()
        said, *_ = [record.getMessage() for record in caplog.records if record.name == "shardnet.rendezvous.joining"]
        assert said == "job 'job': waiting up to 1 s for others that are still in epoch 1"
        for member in members:
            await member.die()


async def test_a_member_of_a_full_job_is_not_told_that_it_waits_for_a_place(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it joins again, also if a spare waits: it has one of the first places."""
    monkeypatch.setattr("shardnet.rendezvous.joining.PATIENCE_S", 0.2)
    async with rendezvous(settle_s=SETTLE_S) as server:
        members = [Person(server.address, elastic(number, least=1, most=2)) for number in range(2)]
        membership, _ = [await member.joined for member in members]
        spare = Person(server.address, elastic(2, least=1, most=2))
        await spare.arrived.wait()
        caplog.clear()
        timeouts = replace(Timeouts.for_tests(), join_s=1.0)
        with pytest.raises(JoinTimeout, match="its workers did not end their epoch within 1 s"):
            await join(server.address, again(_request(membership)), timeouts=timeouts).__aenter__()
        assert "job 'job': waiting up to 1 s for others that are still in epoch 1" in caplog.text
        for person in (*members, spare):
            await person.die()


@pytest.mark.parametrize("limit", ["connect_s", "join_s"])
async def test_a_refusal_that_does_not_pass_is_raised_in_the_end(limit: str) -> None:
    """It says which worker has the address; "no rendezvous answered" would send the user to look at the network."""
    async with rendezvous() as server:
        first = Person(server.address, elastic(0, least=1, most=2))
        await first.joined
        timeouts = replace(Timeouts.for_tests(), **{limit: 2.0})
        second = join(server.address, replace(elastic(1, least=1, most=2), address="10.0.0.1:7000"), timeouts=timeouts)
        with pytest.raises(JoinRefused) as refused:
            await second.__aenter__()
        assert refused.value.reason == Refusal.DUPLICATE_ADDRESS
        await first.leave()


@pytest.mark.parametrize(("answer_s", "error"), [(60.0, JoinRefused), (0.0, RendezvousUnavailable)])
async def test_a_try_that_has_no_time_for_an_answer_does_not_hide_the_last_one(
    answer_s: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But one that has enough, and gets none, does."""
    next_event = Lease.next_event
    tries: list[Lease] = []

    async def slow(self: Lease) -> Event:
        if first.joined.done() and self is not (await first.joined)._lease:
            tries.append(self)
            if len(tries) > 1:
                await asyncio.Event().wait()
        return await next_event(self)

    monkeypatch.setattr(Lease, "next_event", slow)
    monkeypatch.setattr(joining, "ANSWER_S", answer_s)
    async with rendezvous() as server:
        first = Person(server.address, elastic(0, least=1, most=2))
        await first.joined
        timeouts = replace(Timeouts.for_tests(), connect_s=2.0)
        with pytest.raises(error, match=r"10\.0\.0\.1:7000 already belongs to a live worker|no answer"):
            await join(server.address, replace(elastic(1, least=1, most=2), address="10.0.0.1:7000"), timeouts=timeouts).__aenter__()
        assert len(tries) == 2
        await first.leave()


async def test_a_refusal_that_has_passed_is_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    async with rendezvous() as server:
        first = Person(server.address, elastic(0, least=2, most=2))
        await first.arrived.wait()
        timeouts = replace(Timeouts.for_tests(), join_s=3.0)
        second = Person(server.address, replace(elastic(1, least=2, most=2), address="10.0.0.1:7000"), timeouts)
        while "refused" not in caplog.text:  # noqa: ASYNC110 - the rendezvous logs it
            await asyncio.sleep(0.01)
        await first.die()
        with pytest.raises(JoinTimeout, match="only 1 of 2 elastic workers joined"):
            await second.joined


async def test_one_that_is_not_elastic_is_refused_at_once() -> None:
    async with rendezvous() as server:
        first = Person(server.address, worker(0, least=1, most=2))
        await first.joined
        strict = join(server.address, replace(worker(1, least=1, most=2), address="10.0.0.1:7000"), timeouts=Timeouts.for_tests())
        with pytest.raises(JoinRefused) as refused:
            await strict.__aenter__()
        assert refused.value.reason == Refusal.DUPLICATE_ADDRESS
        await first.leave()


def _request(membership: Membership) -> JoinRequest:
    return membership._request
