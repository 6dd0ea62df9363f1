"""A rendezvous that goes and comes back while its jobs run: nobody is lost, and nobody has to be told."""

import asyncio
import logging
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from shardnet.config import Limits
from shardnet.credentials import Role, Security
from shardnet.errors import JoinRefused
from shardnet.rendezvous import client
from shardnet.rendezvous.client import status
from shardnet.rendezvous.events import JobState, Joiners, Lost
from shardnet.rendezvous.job import MISSED_S
from shardnet.rendezvous.lease import Lease
from shardnet.rendezvous.membership import ABSENT, VANISHED, Registry
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.server import RendezvousServer
from shardnet.rendezvous.store import SqliteStore, Store
from shardnet.transport.options import channel_options
from tests.rendezvous.builders import SETTLE, again, assigned, elastic, formed, to, worker
from tests.rendezvous.people import TIMEOUTS, Person, rendezvous
from tests.rendezvous.process import command
from tests.rendezvous.test_processes import process
from tests.shared_loop import on_shared_loop


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return SqliteStore(tmp_path / "rendezvous.db")


def registries(store: Store) -> tuple[Registry, Registry]:
    """A registry with a running epoch of three, and its successor, which knows of it only from the store."""
    before = Registry(settle_s=SETTLE, store=store)
    formed(before, 3)
    after = Registry(settle_s=SETTLE, store=store)
    after.restore(until=100.0)
    return before, after


def test_members_come_back_to_their_epoch(store: Store) -> None:
    before, after = registries(store)
    (told,), (kept,) = before.status(), after.status()
    assert kept == replace(told, absent=3)
    for number in range(3):
        assert Joiners(0) in to(after.resume(elastic(number)), number)
    assert after.status() == (told,)
    assert after.deadline() is None
    with pytest.raises(JoinRefused) as refused:
        after.resume(elastic(1))
    assert refused.value.reason == Refusal.DUPLICATE_INCARNATION
    store.close()


def test_who_does_not_come_back_is_lost_after_a_while(store: Store) -> None:
    _, after = registries(store)
    after.resume(elastic(0))
    after.resume(elastic(2))
    assert after.deadline() == 100.0
    assert after.tick(99.0) == []
    assert to(after.tick(100.0), 0) == [Lost(1, 1, ABSENT, False), Joiners(0)]
    assert [member.rank for member in after.status()[0].members] == [0, 2]
    store.close()


def test_joiners_wait_for_those_that_have_not_come_back(store: Store) -> None:
    _, after = registries(store)
    assert not assigned(after.join(elastic(7), 90.0))
    assert not assigned(after.join(again(elastic(0)), 91.0))
    assert not assigned(after.join(again(elastic(1)), 92.0))
    worlds = assigned(after.tick(100.0))
    assert {name: (world.epoch, world.rank) for name, world in worlds.items()} == {"w0+": (2, 0), "w1+": (2, 1), "w7": (2, 2)}
    store.close()


@pytest.mark.parametrize("first", ["vanish", "join"])
def test_former_members_keep_their_ranks_and_may_name_the_stuck(store: Store, first: str) -> None:
    """Also if their memberships had ended before the rendezvous did."""
    before = Registry(settle_s=SETTLE, store=store)
    workers = formed(before, 3)
    successor = replace(again(workers[0]), missing=(2,))
    if first == "vanish":
        before.vanish("w0")
    else:
        before.join(successor, 10.0)
    after = Registry(settle_s=SETTLE, store=store)
    after.restore(until=100.0)
    after.resume(workers[2])  # its loop lives; its program hangs
    after.join(again(workers[1]), 10.0)
    after.join(successor, 11.0)
    worlds = assigned(after.tick(11.0 + MISSED_S))
    assert {name: world.rank for name, world in worlds.items()} == {"w0+": 0, "w1+": 1}
    store.close()


def test_who_once_was_started_in_place_of_another_one_ends_no_membership_when_it_joins_again(store: Store) -> None:
    """Its process still says that it is a replacement; and these workers have no numbers of their own on their machine."""
    _, after = registries(store)
    assert not assigned(after.join(replace(again(elastic(0)), replacement=True), 10.0))
    assert [after.is_member(f"w{number}") for number in range(3)] == [False, True, True]
    store.close()


def test_who_lost_its_connection_before_may_come_back(store: Store) -> None:
    before = Registry(settle_s=SETTLE, store=store)
    workers = formed(before, 3)
    (told,) = before.status()
    before.vanish("w1")
    after = Registry(settle_s=SETTLE, store=store)
    after.restore(until=100.0)
    for number in (1, 0, 2):
        after.resume(workers[number])
    assert after.status() == (told,)
    store.close()


def test_a_job_is_not_full_of_members_that_have_not_come_back(store: Store) -> None:
    """It may be over: its workers ended while there was no rendezvous, and are now started again."""
    before = Registry(settle_s=SETTLE, store=store)
    for number in range(2):
        before.join(worker(number), 0.0)
    after = Registry(settle_s=SETTLE, store=store)
    after.restore(until=100.0)
    with pytest.raises(JoinRefused, match="2 of its workers have no connection to the rendezvous now") as refused:
        after.join(worker(7), 90.0)
    assert refused.value.reason == Refusal.ABSENT
    after.tick(100.0)
    after.join(worker(7), 100.0)
    assert {world.epoch for world in assigned(after.join(worker(8), 100.0)).values()} == {2}
    store.close()


@on_shared_loop
async def test_workers_that_are_started_again_wait_until_those_before_are_given_up(tmp_path: Path) -> None:
    """As where a whole job is stopped and started again while the rendezvous is away."""
    state, timeouts = tmp_path / "rendezvous.db", replace(TIMEOUTS, lost_s=2.5)
    async with RendezvousServer("127.0.0.1:0", timeouts=timeouts, store=SqliteStore(state)) as server:
        address = server.address
        before = [Person(address, worker(number)) for number in range(2)]
        for person in before:
            await person.joined
    for person in before:
        await person.die()
    async with RendezvousServer(address, timeouts=timeouts, store=SqliteStore(state)):
        after = [Person(address, worker(number)) for number in (7, 8)]
        worlds = [(await person.joined).topology for person in after]
        assert [(world.epoch, world.world_size) for world in worlds] == [(2, 2)] * 2
        for person in after:
            await person.leave()


def restored_after_its_end(store: Store) -> Registry:
    """A rendezvous that is started again after both workers of a job have said goodbye."""
    before = Registry(settle_s=SETTLE, store=store)
    formed(before, 2)
    before.leave("job", "w0")
    before.leave("job", "w1")
    after = Registry(settle_s=SETTLE, store=store)
    after.restore(until=100.0)
    return after


def test_epochs_go_on_for_a_job_that_had_ended(store: Store) -> None:
    after = restored_after_its_end(store)
    assert after.status()[0].state is JobState.FINISHED
    for number in (3, 4):
        after.join(elastic(number), 0.0)
    assert {world.epoch for world in assigned(after.tick(SETTLE)).values()} == {2}
    store.close()


def test_a_training_that_is_over_stays_so(store: Store) -> None:
    """A replacement that comes late does not start again what the others have finished."""
    after = restored_after_its_end(store)
    with pytest.raises(JoinRefused, match="the training of job 'job' has ended"):
        after.join(replace(elastic(3), replacement=True), 0.0)
    store.close()


def test_a_training_that_was_lost_is_still_lost_if_its_survivors_give_up(store: Store) -> None:
    before = Registry(settle_s=SETTLE, store=store)
    formed(before, 2)
    before.vanish("w0")
    before.join(again(elastic(1)), 0.0)
    after = Registry(settle_s=SETTLE, store=store)
    after.restore(until=100.0)
    after.join(again(elastic(1)), 0.0)
    after.vanish("w1+")
    assert after.status()[0].state is JobState.LOST
    store.close()


def test_a_stranger_is_not_taken_for_a_member(store: Store) -> None:
    _, after = registries(store)
    for request in (elastic(9), replace(elastic(1), job="other")):
        with pytest.raises(JoinRefused) as refused:
            after.resume(replace(request, incarnation="w9"))
        assert refused.value.reason == Refusal.UNKNOWN
    store.close()


@pytest.mark.parametrize("other", [{"job": "evil"}, {"identity": "shardnet:worker:job:mallory"}, {"address": "10.0.0.9:1"}])
def test_who_knows_a_members_incarnation_is_not_that_member(store: Store, other: dict[str, str]) -> None:
    _, after = registries(store)
    stranger = replace(elastic(1), **other)  # type: ignore[arg-type]
    with pytest.raises(JoinRefused) as before:
        after.resume(stranger)
    after.resume(elastic(1))  # the member itself
    with pytest.raises(JoinRefused) as afterwards:
        after.resume(stranger)
    assert before.value.reason == afterwards.value.reason == Refusal.UNKNOWN
    store.close()


def test_who_only_lost_its_connection_may_come_back_while_its_epoch_runs() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 3)
    registry.vanish("w1")
    with pytest.raises(JoinRefused):
        registry.resume(replace(workers[1], address="10.0.0.9:1"))
    assert to(registry.resume(workers[1]), 1) == [Joiners(0)]
    assert [member.rank for member in registry.status()[0].members] == [0, 1, 2]
    registry.vanish("w0")
    registry.join(again(workers[2]), 1.0)
    registry.join(again(workers[1]), 1.0)
    with pytest.raises(JoinRefused) as refused:
        registry.resume(workers[0])
    assert refused.value.reason == Refusal.UNKNOWN


def test_who_has_left_does_not_come_back() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 3)
    registry.leave("job", "w1")
    with pytest.raises(JoinRefused):
        registry.resume(workers[1])


def test_who_has_joined_again_does_not_come_back_as_the_member_that_it_was() -> None:
    """Its request to come back was under way when it joined. Nobody would end that membership before the next epoch has formed."""
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 3)
    registry.vanish("w1")
    registry.join(again(workers[1]), 1.0)
    with pytest.raises(JoinRefused) as refused:
        registry.resume(workers[1])
    assert refused.value.reason == Refusal.DUPLICATE_ADDRESS
    registry.join(again(workers[0]), 1.0)
    assert assigned(registry.join(again(workers[2]), 1.0)).keys() == {"w0+", "w1+", "w2+"}


def test_nobody_comes_back_beside_another_worker_with_its_certificate() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = [replace(elastic(number, most=2), identity="shardnet:worker:job:a", local_rank_hint=number) for number in range(2)]
    for request in workers:
        registry.join(request, 0.0)
    registry.vanish("w1")
    registry.join(replace(workers[1], incarnation="w7", address="10.0.0.1:7007"), 1.0)  # the program was started again
    with pytest.raises(JoinRefused) as refused:
        registry.resume(workers[1])
    assert refused.value.reason == Refusal.DUPLICATE_WORKER


def test_even_where_all_had_lost_it() -> None:
    registry = Registry(settle_s=SETTLE)
    workers = formed(registry, 2)
    registry.vanish("w0")
    registry.vanish("w1")
    assert registry.status()[0].state is JobState.LOST
    registry.resume(workers[1])
    assert registry.status()[0].state is JobState.RUNNING
    registry.resume(workers[0])
    assert [member.rank for member in registry.status()[0].members] == [0, 1]


# --- real ones


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
@on_shared_loop
async def test_a_rendezvous_that_is_killed_and_started_again_has_its_members_back(
    stop: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    back = asyncio.Semaphore(0)

    def count(record: logging.LogRecord) -> bool:
        if re.search(r"\d is back$", record.getMessage()):
            back.release()
        return True

    caplog.handler.addFilter(count)
    caplog.set_level(logging.INFO)  # a warning only if it takes long
    state = tmp_path / "rendezvous.db"
    async with process(*command("rendezvous", "127.0.0.1:0", state=state)) as (server, address):
        people = [Person(address, elastic(number, most=3)) for number in range(3)]
        assert sorted([await person.rank() for person in people]) == [0, 1, 2]
        server.send_signal(stop)
        await asyncio.to_thread(server.wait)
    async with process(*command("rendezvous", address, state=state)) as (_, same):
        assert same == address
        by_rank = {await person.rank(): person for person in people}
        (job,) = await status(address)
        assert (job.epoch, [member.rank for member in job.members]) == (1, [0, 1, 2])
        for _ in people:
            await back.acquire()
        await by_rank[1].die()
        assert await by_rank[0].lost.get() == (1, "its connection to the rendezvous broke", False)
        for rank in (0, 2):
            await by_rank[rank].leave()


@on_shared_loop
async def test_a_rendezvous_without_its_state_says_so_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "AWAY_S", 1e6)
    async with rendezvous() as server:
        address = server.address
        people = [Person(address, worker(number)) for number in range(2)]
        for person in people:
            await person.rank()
    async with rendezvous(address):
        memberships = [await person.joined for person in people]
        await asyncio.wait([membership._watch for membership in memberships if membership._watch], timeout=TIMEOUTS.join_s)
        assert all(membership._watch is not None and membership._watch.done() for membership in memberships)
        for person in people:
            await person.leave()
    said = [record.getMessage() for record in caplog.records]
    assert not any("is gone" in line for line in said), "it was away for a moment only"
    assert sum("does not take this worker back" in line and "shardnet rendezvous --state" in line for line in said) == 2


@pytest.mark.parametrize("knows", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@on_shared_loop
async def test_a_membership_with_a_successor_does_not_come_back(
    when: str, knows: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendezvous, which may be away when a worker asks for its next membership, need not know this one any more. If it does, it is
    not to take this one for a member."""
    monkeypatch.setattr(client, "AWAY_S", 0.0)

    def store() -> Store | None:
        return SqliteStore(tmp_path / "rendezvous.db") if knows else None

    async with RendezvousServer("127.0.0.1:0", timeouts=TIMEOUTS, store=store()) as server:
        address = server.address
        people = [Person(address, worker(number)) for number in range(2)]
        memberships = [await person.joined for person in people]
        if when == "before":
            for membership in memberships:
                membership.supersede()
    async with asyncio.timeout(TIMEOUTS.join_s):
        while when == "after" and not all(membership._away for membership in memberships):  # noqa: ASYNC110 - it is noticed soon
            await asyncio.sleep(0.01)
    for membership in memberships:
        membership.supersede()
    async with RendezvousServer(address, timeouts=TIMEOUTS, store=store()):
        await asyncio.wait([membership._watch for membership in memberships if membership._watch], timeout=TIMEOUTS.join_s)
        assert all(membership._watch is not None and membership._watch.done() for membership in memberships)
        for person in people:
            await person.leave()
    said = [record.getMessage() for record in caplog.records]
    assert sum("is gone" in line for line in said) == (2 if when == "after" else 0)
    assert not any("does not take this worker back" in line for line in said)


@on_shared_loop
async def test_a_late_request_to_come_back_does_not_stop_the_next_epoch() -> None:
    """The lease of one of two members broke; it joins again, and after that the rendezvous hears that it would like to come back."""
    async with rendezvous() as server:
        first, second = [elastic(number, most=2) for number in range(2)]
        staying, breaking = Person(server.address, first), Person(server.address, second)
        lost = await staying.joined, await breaking.joined
        await breaking.die()
        assert await staying.lost.get() == (lost[1].topology.rank, VANISHED, False)
        successors = [Person(server.address, again(second))]
        await successors[0].arrived.wait()
        async with Security().channel(server.address, channel_options(TIMEOUTS, Limits()), to=Role.RENDEZVOUS) as channel:
            late = Lease(channel, server.address, replace(second, resumes=True))
            with pytest.raises(JoinRefused):
                await late.next_event()
        successors.append(Person(server.address, again(first)))
        assert {(await person.joined).topology.epoch for person in successors} == {2}
        for person in (staying, *successors):
            await person.leave()
