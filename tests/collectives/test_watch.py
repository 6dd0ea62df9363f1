"""Collectives that wait for long: which rank is told of which, how often, and that no rank asks while all goes well."""

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from shardnet.backend import Pending
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.group import Group
from shardnet.collectives.letters.attendant import Attendant
from shardnet.collectives.operation import Call, Operation
from shardnet.collectives.roll_call import BUSY_BYTES, Attendance, RollCall
from shardnet.collectives.switchboard import WORLD
from shardnet.collectives.watch import ALIKE, PATIENT_S
from shardnet.config import Limits, Timeouts
from shardnet.errors import CollectiveTimeout
from shardnet.loop import LoopThread
from shardnet.observation.replies import read_stats
from shardnet.testing import each_error, each_rank, local_cluster, loopback_cluster
from shardnet.training.snapshot import worker_snapshot
from shardnet.transport.base import Mesh
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.shared_memory import futex

NEEDS_MAILBOXES = pytest.mark.skipif(not futex.available, reason="mailboxes need x86-64")
KINDS = ("loopback", "grpc", pytest.param("letters", marks=NEEDS_MAILBOXES))
SELDOM = (pytest.param("loopback", marks=pytest.mark.faults), pytest.param("letters", marks=(pytest.mark.faults, NEEDS_MAILBOXES)))
SUSPECT_S = 0.3
TIMEOUTS = replace(Timeouts.for_tests(), suspect_s=SUSPECT_S, lost_s=30.0)
Ranks = Sequence[MeshBackend]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@asynccontextmanager
async def cluster(kind: str, size: int = 3, **limits: int) -> AsyncIterator[Ranks]:
    if kind == "loopback":
        async with loopback_cluster(size, timeouts=TIMEOUTS, limits=Limits(**limits)) as ranks:
            yield ranks
        return
    letters = 64 if kind == "letters" else 0
    async with local_cluster(size, timeouts=TIMEOUTS, limits=Limits(letter_bytes=letters, **limits)) as ranks:
        yield ranks


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Each time that a rank asks others: that rank, and for which sequence number."""
    asked: list[tuple[int, int]] = []
    hold = RollCall.hold

    async def held(self: RollCall, sequence: int) -> Attendance:
        asked.append((self._group.board.mesh.rank, sequence))
        return await hold(self, sequence)

    monkeypatch.setattr(RollCall, "hold", held)
    return asked


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)


async def until_calm(ranks: Ranks) -> None:
    """Wait until nobody checks any more whether something is stuck."""
    await until(lambda: not any(rank._board.watch._armed for rank in ranks))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "shardnet.collectives.watch"]


async def test_who_has_not_come_is_named_once_and_until_it_comes(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """This holds although nobody waits for the collective yet. What status shows is asked again each time, and ends with the wait."""
    async with cluster(kind) as ranks:
        await each_rank(ranks, lambda rank: rank.all_gather(torch.ones(2), label="the last one"))
        early = [rank.barrier(label="x") for rank in ranks[:2]]
        await until(lambda: all(rank.telemetry.waiting for rank in ranks[:2]))
        for rank in ranks[:2]:
            (first,) = rank.telemetry.waiting
            (shown,) = worker_snapshot(rank.telemetry, None).waiting
            assert (shown.collective, [each.rank for each in shown.absent]) == ("barrier #1 of x", [2])
            assert SUSPECT_S <= shown.seconds < 10.0
            assert (shown.absent[0].next_sequence, shown.absent[0].last_entered) == (1, "all_gather(float32 [2]) of the last one")
            await until(lambda rank=rank, first=first: rank.telemetry.waiting[0] is not first)  # type: ignore[misc]
        await ranks[2].barrier(label="x")
        for handle in early:
            await handle
        assert not any(worker_snapshot(rank.telemetry, None).waiting for rank in ranks)
        await until_calm(ranks)
        assert not any(rank.telemetry.waiting for rank in ranks)
    where = r"waits \d\.\d s in barrier #1 of x for rank 2 \(at #1, last entered all_gather\(float32 \[2\]\) of the last one\)"
    lines = sorted(said(caplog))
    assert len(lines) == 2
    for number, line in enumerate(lines):
        assert re.fullmatch(rf"\[rank {number}/3 epoch 1 step 0\] {where}", line), line
    assert {each.levelno for each in caplog.records if each.name == "shardnet.collectives.watch"} == {logging.WARNING}


async def test_ranks_that_have_parted_ways_are_told_where_each_of_them_waits(kind: str) -> None:
    """Each waits for the other one in a different group."""
    async with cluster(kind, 2) as ranks:
        first, second = ([rank.subgroup([0, 1]) for rank in ranks] for _ in range(2))
        early: list[Pending[Any]] = [first[0].all_gather(torch.ones(2), label="forward"), second[1].barrier(label="backward")]
        await until(lambda: all(rank.telemetry.waiting for rank in ranks))
        shown = [str(rank.telemetry.waiting[0].absent[0]) for rank in ranks]
        of, other = "of the group of ranks [0, 1]", "of another group of the same ranks"
        assert shown == [
            f"rank 1 (at #0, last entered nothing; it waits in barrier #0 of backward {other})",
            f"rank 0 (at #0, last entered nothing; it waits in all_gather #0 of forward {other})",
        ]
        (stuck,) = read_stats(worker_snapshot(ranks[0].telemetry, None)).waiting
        assert stuck.absent[0].waits_in == f"barrier #0 of backward {other}"
        (error,) = await each_error(ranks[:1], lambda rank: rank.barrier(timeout_s=0.1))
        assert f"it waits in barrier #0 of backward {of})" in str(error)
        await each_error(ranks[1:], lambda rank: rank.barrier())
        early += [first[1].all_gather(torch.ones(2), label="forward"), second[0].barrier(label="backward")]
        for handle in early:
            await handle
        (error,) = await each_error(ranks[:1], lambda rank: rank.barrier(timeout_s=0.1))
        assert "waits in" not in str(error)
        await each_error(ranks[1:], lambda rank: rank.barrier())


async def test_a_receive_that_stands_open_is_named_only_where_there_is_nothing_else(kind: str) -> None:
    async with cluster(kind, 2) as ranks:

        async def missing() -> str:
            (error,) = await each_error(ranks[:1], lambda rank: rank.barrier(timeout_s=0.1))
            await each_error(ranks[1:], lambda rank: rank.barrier())
            return str(error)

        standing = ranks[1].recv(torch.ones(2), 0, tag="control")
        assert "; it waits in recv #0 of the channel 'control' from rank 0 to rank 1)" in await missing()
        groups = [rank.subgroup([0, 1]) for rank in ranks]
        early = groups[1].barrier(label="elsewhere")
        assert "; it waits in barrier #0 of elsewhere of the group of ranks [0, 1])" in await missing()
        await groups[0].barrier(label="elsewhere")
        await early
        await ranks[0].send(torch.ones(2), 1, tag="control")
        await standing


async def test_what_a_rank_has_entered_in_the_same_group_is_not_elsewhere(kind: str) -> None:
    async with cluster(kind) as ranks:
        early = [rank.barrier() for rank in ranks[:2]]  # rank 2 is late
        (error,) = await each_error(ranks[:1], lambda rank: rank.all_gather(torch.ones(2), timeout_s=0.1))
        assert re.search(r"missing rank 1 \(at #1, last entered barrier\S*\); rank 2 \(at #0, last entered nothing\)", str(error)), error
        late = ranks[2].barrier()
        for handle in [*early, late]:
            await handle
        await each_error(ranks[1:], lambda rank: rank.all_gather(torch.ones(2)))


async def test_what_is_given_much_time_is_shown_and_not_told(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """For example a wait for the other ranks' disks."""
    async with cluster(kind, 2) as ranks:
        early = ranks[0].barrier(timeout_s=PATIENT_S)
        await until(lambda: ranks[0].telemetry.waiting)
        (first,) = ranks[0].telemetry.waiting
        await until(lambda: ranks[0].telemetry.waiting[0] is not first)
        await ranks[1].barrier(timeout_s=PATIENT_S)
        await early
    assert said(caplog) == []


async def test_nobody_is_asked_while_all_goes_well(kind: str, asked: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """Neither about collectives that have ended, nor about one that all have entered and whose result one rank does not look at."""
    async with cluster(kind) as ranks:
        for _ in range(5):
            await each_rank(ranks, lambda rank: rank.barrier())
        handles = [rank.barrier() for rank in ranks]
        assert any(rank._board.watch._armed for rank in ranks)
        await until_calm(ranks)
        for handle in handles:
            await handle
    assert (asked, said(caplog)) == ([], [])


async def test_what_begins_after_a_calm_time_is_noticed_again(kind: str) -> None:
    async with cluster(kind, 2) as ranks:
        await each_rank(ranks, lambda rank: rank.barrier())
        await until_calm(ranks)
        early = ranks[0].barrier()
        await until(lambda: ranks[0].telemetry.waiting)
        await ranks[1].barrier()
        await early


async def test_of_several_in_one_group_the_first_is_asked_for(kind: str, asked: list[tuple[int, int]]) -> None:
    async with cluster(kind, 2, max_outstanding=2) as ranks:
        early = [ranks[0].barrier() for _ in range(4)]
        await until(lambda: ranks[0].telemetry.waiting)
        assert set(asked) == {(0, 0)}
        await ranks[1].barrier()
        await until(lambda: (0, 1) in asked)
        for _ in early[1:3]:
            await ranks[1].barrier()
        await until(lambda: (0, 3) in asked)  # this collective had to wait for its turn
        assert {sequence for _, sequence in asked} <= {0, 1, 2, 3}
        await ranks[1].barrier()
        for handle in early:
            await handle


@NEEDS_MAILBOXES
async def test_one_whose_turn_comes_in_a_calm_time_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The collective before it is complete and only waits for somebody to look at it."""
    monkeypatch.setattr(Attendant, "take", lambda *_: None)
    async with cluster("letters", 2, max_outstanding=1) as ranks:
        early = [ranks[0].barrier() for _ in range(2)]
        late = ranks[1].barrier()
        await until_calm(ranks)
        assert early[0].done()
        await until(lambda: ranks[0].telemetry.waiting)
        assert late.done()
        await asyncio.to_thread(ranks[1].barrier().wait)
        await asyncio.to_thread(early[1].wait)
        early[0].wait()
        late.wait()


@pytest.mark.parametrize("kind", ["grpc", *SELDOM])
async def test_a_rank_writes_at_most_one_line_a_second(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with cluster(kind, 2) as ranks:
        groups = [ranks[0], ranks[0].subgroup([0, 1]), ranks[0].subgroup([0, 1])]
        early = [group.barrier() for group in groups]
        await until(lambda: len(said(caplog)) == 3)
        times = [each.created for each in caplog.records if each.name == "shardnet.collectives.watch"]
        assert all(later - earlier > 0.99 for earlier, later in pairwise(times))
        first, *others = said(caplog)
        assert " in barrier #0 for rank 1 (at #0, last entered nothing)" in first
        # whose members have not even made it yet
        assert all(" in barrier #0 of the group of ranks [0, 1] for rank 1 (at #0, last entered nothing)" in each for each in others)
        for group in (ranks[1], ranks[1].subgroup([0, 1]), ranks[1].subgroup([0, 1])):
            await group.barrier()
        for handle in early:
            await handle


async def test_of_many_that_are_alike_those_are_asked_for_that_time_out_first() -> None:
    """Other kinds of calls are asked about as well."""
    async with cluster("grpc", 2) as ranks:
        into = torch.zeros(20, 1)
        early = [ranks[0].recv(into[at], 1, tag=str(at), label=str(at), timeout_s=40.0 - at) for at in range(20)]
        barrier = ranks[0].barrier()
        await until(lambda: len(ranks[0].telemetry.waiting) > ALIKE)
        shown = {each.flight.name for each in ranks[0].telemetry.waiting}
        assert shown == {"barrier #0", *(f"recv #0 of {at}" for at in range(20 - ALIKE, 20))}
        await ranks[1].barrier()
        await barrier
        for at, handle in enumerate(early):
            await ranks[1].send(torch.full((1,), float(at)), 0, tag=str(at), label=str(at))
            await handle
        assert into.flatten().tolist() == [*range(20)]


async def test_who_does_not_answer_is_shown_with_its_address(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "_answer_probe", lambda *_: None)
    async with cluster(kind, 2) as ranks:
        early = ranks[0].barrier()
        await until(lambda: ranks[0].telemetry.waiting)
        (shown,) = worker_snapshot(ranks[0].telemetry, None).waiting
        assert not shown.absent[0].HasField("next_sequence")
        assert re.search(r"for rank 1 \((memory:1|127\.0\.0\.1:\d+), no answer\)", str(ranks[0].telemetry.waiting[0]))
        await ranks[1].barrier()
        await early


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data moves on all links, and in the world's queue everything else waits after it, as on a slow link. Groups have another queue."""
    answer, moved = Group._answer_probe, itertools.count(step=BUSY_BYTES)
    monkeypatch.setattr(Group, "_answer_probe", lambda self, *probe: None if self.id == WORLD else answer(self, *probe))
    for mesh in (GrpcMesh, Mesh):
        monkeypatch.setattr(mesh, "moved_bytes", lambda *_: next(moved))


@pytest.mark.usefixtures("moving")
async def test_who_cannot_answer_for_data_is_slow_and_not_missing(
    kind: str, asked: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(kind, 2) as ranks:
        early = ranks[0].barrier(timeout_s=3 * SUSPECT_S)
        await until(lambda: asked)
        with pytest.raises(
            CollectiveTimeout, match=r"data still moves to or from rank 1 \(.*\), so the network or a rank is too slow"
        ) as caught:
            await early
        assert caught.value.missing == ()
        assert ranks[0].telemetry.stalls.count == 0
        with pytest.raises(CollectiveTimeout):
            await ranks[1].barrier()
    assert said(caplog) == []


async def test_a_link_may_stand_still_while_it_is_looked_at(asked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost packets can stop a link for longer than one waits for an answer. So data that has moved since the last look counts, too."""
    monkeypatch.setattr(Group, "_answer_probe", lambda *_: None)
    monkeypatch.setattr(GrpcMesh, "moved_bytes", lambda *_: len(asked) * BUSY_BYTES)
    async with cluster("grpc", 2) as ranks:
        early = ranks[0].barrier(timeout_s=8 * SUSPECT_S)
        await until(lambda: ranks[0].telemetry.waiting)
        await until(lambda: not ranks[0].telemetry.waiting)
        with pytest.raises(CollectiveTimeout, match="data still moves to or from rank 1"):
            await early
        with pytest.raises(CollectiveTimeout):
            await ranks[1].barrier()


@pytest.mark.usefixtures("moving")
async def test_who_is_busy_in_one_group_holds_up_no_other(kind: str) -> None:
    async with cluster(kind, 2) as ranks:
        groups = [rank.subgroup(range(2)) for rank in ranks]
        early = ranks[0].barrier(), groups[0].barrier()
        await until(lambda: ranks[0].telemetry.waiting)
        (waiting,) = ranks[0].telemetry.waiting
        assert [(each.rank, each.next_sequence) for each in waiting.absent] == [(1, 0)]
        assert "of the group of ranks [0, 1]" in str(waiting)
        await ranks[1].barrier()
        await groups[1].barrier()
        for each in early:
            await each


async def test_what_moves_is_counted_in_both_directions() -> None:
    async with local_cluster(2, timeouts=TIMEOUTS, shared_memory=lambda _: False) as ranks:
        into, data = torch.empty(100_000), torch.ones(100_000)
        meshes = [rank._board.mesh for rank in ranks]
        before = [mesh.moved_bytes(1 - mesh.rank) for mesh in meshes]
        received = ranks[1].recv(into, 0)
        await ranks[0].send(data, 1)
        await received
        await until(lambda: all(mesh.moved_bytes(1 - mesh.rank) - start >= data.nbytes for mesh, start in zip(meshes, before, strict=True)))


async def test_who_does_not_answer_pings_is_not_asked(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would seem to be alive, and be lost later."""
    answered: list[int] = []
    answer = Group._answer_probe

    def answer_probe(self: Group, *probe: Any) -> None:
        answered.append(self.board.mesh.rank)
        answer(self, *probe)

    monkeypatch.setattr(Group, "_answer_probe", answer_probe)
    async with cluster(kind) as ranks:
        monkeypatch.setattr(ranks[0]._board.mesh, "is_silent", lambda rank: rank == 2)
        early = ranks[0].barrier()
        await until(lambda: ranks[0].telemetry.waiting)
        (waiting,) = ranks[0].telemetry.waiting
        assert [(each.rank, each.next_sequence) for each in waiting.absent] == [(1, 0), (2, None)]
        assert answered == [1]
        await each_rank(ranks[1:], lambda rank: rank.barrier())
        await early


async def test_what_all_have_entered_is_slow_and_not_stuck(asked: list[tuple[int, int]], caplog: pytest.LogCaptureFixture) -> None:
    """The others are asked about it once."""
    async with cluster("grpc", 2) as ranks:
        loop = LoopThread.shared()
        finish = asyncio.Event()

        async def slow(operation: Operation) -> None:
            operation.sink = lambda *_: None
            await finish.wait()

        call = Call("slow", "", "", 15.0, "slow")
        futures = [rank._group.operations.begin(call, slow, rank.rank) for rank in ranks]
        await until_calm_again(ranks, asked)
        loop.call(finish.set)
        assert [await asyncio.wrap_future(future) for future in futures] == [0, 1]
    assert (sorted(asked), said(caplog)) == ([(0, 0), (1, 0)], [])


async def until_calm_again(ranks: Ranks, asked: list[tuple[int, int]]) -> None:
    await until(lambda: len(asked) >= 2)
    await until_calm(ranks)


async def test_a_timeout_says_the_same(kind: str) -> None:
    """It asks other ranks in the same way."""
    async with cluster(kind) as ranks:
        errors = await each_error(ranks[:2], lambda rank: rank.barrier(timeout_s=2 * SUSPECT_S))
        for error in errors:
            assert isinstance(error, CollectiveTimeout)
            assert error.missing == (2,)
            assert "missing rank 2 (at #0, last entered nothing)" in str(error)
        assert not any(worker_snapshot(rank.telemetry, None).waiting for rank in ranks)


async def test_an_aborted_backend_asks_nobody(kind: str) -> None:
    async with cluster(kind, 2) as ranks:
        handle = ranks[0].barrier()
        await until(lambda: ranks[0].telemetry.waiting)
        for rank in ranks:
            rank.abort()
        await asyncio.to_thread(handle.exception)
        await asyncio.gather(*(rank.aclose() for rank in ranks))
        assert ranks[0].telemetry.waiting == ()
        assert ranks[0]._board.watch._asking is not None
        await until(ranks[0]._board.watch._asking.done)
