"""The small parts: mailbox, back-off, identity, messages."""

import asyncio
from itertools import islice

import pytest

from shardnet.errors import ProtocolError
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.rendezvous import messages
from shardnet.rendezvous.backoff import FIRST_S, MOST_S, delays
from shardnet.rendezvous.events import Assigned, Event, JobState, JobStatus, Joiners, Lost, Waiting
from shardnet.rendezvous.identity import new_incarnation, node_identity
from shardnet.rendezvous.mailbox import Mailbox
from shardnet.rendezvous.placement import place
from shardnet.rendezvous.request import MAX_TEXT
from shardnet.rendezvous.tasks import end_task
from shardnet.topology import Topology
from tests.rendezvous.builders import worker

MEMBERS = place([worker(0), worker(1, node="b")])


class TestMailbox:
    async def test_keeps_the_newest_waiting_only(self) -> None:
        mailbox = Mailbox()
        for joined in range(1, 1000):
            mailbox.put(Waiting(joined, 2, 1000))
        mailbox.put(Lost(1, 0, "gone", False))
        mailbox.put(Waiting(7, 2, 1000))
        mailbox.close()
        mailbox.put(Waiting(8, 2, 1000))  # too late
        assert [await mailbox.take() for _ in range(4)] == [Waiting(999, 2, 1000), Lost(1, 0, "gone", False), Waiting(7, 2, 1000), None]

    async def test_keeps_the_newest_number_of_joiners_only(self) -> None:
        mailbox = Mailbox()
        for count in range(1000):
            mailbox.put(Joiners(count % 2, count))
        mailbox.put(Waiting(7, 2, 1000))
        mailbox.close()
        assert [await mailbox.take() for _ in range(3)] == [Joiners(1, 999), Waiting(7, 2, 1000), None]

    async def test_wakes_a_taker_that_waits(self) -> None:
        mailbox = Mailbox()
        taker = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.put(Waiting(1, 1, 2))
        assert await taker == Waiting(1, 1, 2)
        taker = asyncio.create_task(mailbox.take())
        await asyncio.sleep(0)
        mailbox.close()
        assert await taker is None


def test_delays_grow_to_a_limit_and_differ() -> None:
    pauses = list(islice(delays(seed=1), 20))
    bounds = [min(FIRST_S * 2**i, MOST_S) for i in range(20)]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(pauses, bounds, strict=True))
    assert pauses != list(islice(delays(seed=2), 20))


def test_node_identity_is_stable_printable_and_can_be_given() -> None:
    assert node_identity() == node_identity()
    assert node_identity().isprintable()
    assert len(node_identity()) <= MAX_TEXT
    assert node_identity("rack 7") == "rack 7"


def test_incarnations_differ() -> None:
    assert len({new_incarnation() for _ in range(100)}) == 100


@pytest.mark.parametrize("event", [Waiting(1, 2, 3), Assigned(Topology(4, 1, MEMBERS)), Lost(4, 0, "it left", True)])
def test_events_survive_the_wire(event: Event) -> None:
    data = messages.write_event(event).SerializeToString()
    assert messages.read_event(pb.MembershipEvent.FromString(data)) == event


def test_status_survives_the_wire() -> None:
    status = JobStatus("j", JobState.RUNNING, 3, 2, 1, 2, MEMBERS)
    assert messages.read_status(messages.write_status(status)) == status


@pytest.mark.parametrize(
    "message",
    [
        pb.MembershipEvent(),
        pb.MembershipEvent(assignment=pb.Assignment(epoch=1, rank=0)),
        pb.MembershipEvent(assignment=pb.Assignment(epoch=1, rank=0, members=[pb.Member(rank=1)])),
        pb.MembershipEvent(assignment=pb.Assignment(epoch=1, rank=1, members=[pb.Member(rank=0)])),
    ],
)
def test_events_that_make_no_sense(message: pb.MembershipEvent) -> None:
    with pytest.raises(ProtocolError):
        messages.read_event(message)


def test_job_in_an_unknown_state() -> None:
    with pytest.raises(ProtocolError, match="unknown state 'dancing'"):
        messages.read_status(pb.JobStatus(job="j", state="dancing"))


class TestEndTask:
    async def test_waits_for_the_end(self) -> None:
        ended = False

        async def slow_to_end() -> None:
            nonlocal ended
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                ended = True

        task = asyncio.create_task(slow_to_end())
        await asyncio.sleep(0)
        await end_task(task)
        assert ended

    async def test_raises_what_the_task_raised(self) -> None:
        async def fail() -> None:
            raise RuntimeError("boom")

        task = asyncio.create_task(fail())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="boom"):
            await end_task(task)

    async def test_cancelling_the_caller_is_not_swallowed(self) -> None:
        release = asyncio.Event()

        async def stubborn() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await release.wait()

        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        caller = asyncio.create_task(end_task(task))
        await asyncio.sleep(0)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        release.set()
        await task
