"""Large collectives among ranks of one node: letters say where the data is (see [Note: rounds that lend])."""

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.letters.loan_round import LoanRound
from shardnet.collectives.letters.round import Course
from shardnet.collectives.letters.rounds import Rounds
from shardnet.collectives.route import Routing
from shardnet.errors import ClosedError, CollectiveError, CollectiveTimeout, PeerLost
from shardnet.testing import each_rank, local_cluster
from shardnet.transport.shared_memory import futex
from shardnet.transport.shared_memory.lending import Borrowed
from shardnet.transport.shared_memory.mailbox import Mailbox
from shardnet.wire import LoanRevoked
from tests.collectives.letters.rounds import LARGE, LARGER, LIMITS, interrupt, leave_all_to_threads, ones_of
from tests.contract.programs import Runner, random_step

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")

Read = Callable[[Borrowed, int, np.ndarray], None]
KINDS: dict[str, Callable[[Backend], Pending[Any]]] = {
    "all_reduce": lambda rank: rank.all_reduce(LARGER),
    "broadcast": lambda rank: rank.broadcast(LARGER, 1),
    "all_gather": lambda rank: rank.all_gather(LARGER),
    "reduce_scatter": lambda rank: rank.reduce_scatter(LARGER),
    "all_reduce_pieces": lambda rank: rank.all_reduce_pieces(torch.split(LARGER, LARGER.numel() // 5 + rank.rank)),
    "reduce_scatter_pieces": lambda rank: rank.reduce_scatter_pieces(torch.split(LARGER, LARGER.numel() // 5 + rank.rank)),
    "all_to_all": lambda rank: rank.all_to_all(LARGER),
    "all_gather_on_node": lambda rank: rank.all_gather_on_node(LARGER.repeat(2)),
    "broadcast_on_node": lambda rank: rank.broadcast_on_node(LARGER.repeat(2), 1),
}


def lends(handle: Pending[Any]) -> bool:
    return isinstance(handle._future, LoanRound)


async def done(handle: Pending[Any]) -> None:
    assert handle.op_name
    await handle


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_large_lends_where_a_node_is_all_there_is(kind: str) -> None:
    for options, does in (
        ({}, True),
        ({"lending": False}, False),
        ({"shared_memory": False}, False),
        ({"routing": Routing.RING}, False),
        ({"ranks_per_node": 1}, False),
    ):
        async with local_cluster(2, limits=LIMITS, **options) as ranks:
            handles = [KINDS[kind](rank) for rank in ranks]
            assert [lends(handle) for handle in handles] == [does] * 2
            await asyncio.gather(*map(done, handles))


@pytest.mark.parametrize("most", sorted({1, futex.most}))
async def test_waiting_at_several_mailboxes(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank that comes is heard, also where the system lets a thread sleep at only one mailbox."""
    monkeypatch.setattr(futex, "most", most)
    async with local_cluster(4, limits=LIMITS) as ranks:
        pairs = [[ranks[rank].subgroup([0, other]) for rank in (0, other)] for other in (1, 2, 3)]
        for first in range(3):
            waiting = [pair[0].all_reduce(LARGER) for pair in pairs]
            for each in (first, *({0, 1, 2} - {first})):
                await asyncio.sleep(0.02)  # for the attendant to sleep
                await pairs[each][1].all_reduce(LARGER)
                assert torch.equal(await waiting[each], ones_of(2, LARGER))


async def test_random_programs_that_lend_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """No data goes by letter, and every third letter finds no room: those go over the streams, with their marks and receipts."""
    posted, post = 0, Mailbox.post

    def post_some(self: Mailbox, *args: Any) -> Any:
        nonlocal posted
        posted += 1
        return post(self, *args) if posted % 3 else None

    monkeypatch.setattr(MeshBackend, "_mail", lambda *_: None)
    async with local_cluster(4, limits=LIMITS) as ranks:
        monkeypatch.setattr(Mailbox, "post", post_some)
        runner = Runner(ranks)
        for seed in range(15):
            rng = random.Random(seed)
            await asyncio.to_thread(runner.run, [random_step(rng, rows=40) for _ in range(30)], seed)
    assert posted > 300


async def test_a_mark_may_come_over_its_stream_before_the_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """That happens if the letter came before the round began, and the loop thread has not seen yet that the round has begun."""
    post, announce, deliver, step = Mailbox.post, Rounds.announce, LoanRound.deliver, LoanRound.step
    held, heard = list[Any](), list[Any]()

    def announce_late(self: Rounds, *args: Any) -> None:
        held.append(args)
        if len(held) == 2:
            for each in reversed(held):
                announce(self, *each)

    def hear(self: LoanRound, *args: Any) -> None:
        deliver(self, *args)
        heard.append(args)

    async with local_cluster(2, limits=LIMITS) as ranks:
        await each_rank(ranks, lambda rank: rank.all_reduce(LARGE))
        monkeypatch.setattr(Mailbox, "post", lambda self, *args: None if self.place else post(self, *args))
        monkeypatch.setattr(Rounds, "announce", announce_late)
        monkeypatch.setattr(LoanRound, "deliver", hear)
        # it does nothing for its round before both have come
        monkeypatch.setattr(LoanRound, "step", lambda self: step(self) if self._mail.group.rank or len(heard) == 2 else self.readers[0])
        handles = [rank.all_reduce(LARGE, timeout_s=10.0) for rank in ranks]
        for handle in handles:
            assert torch.equal(await handle, ones_of(2, LARGE))


# --- who does the work


async def test_it_ends_though_nobody_waits_for_it() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        handles = [rank.all_reduce(LARGE) for rank in ranks]
        assert torch.equal(await handles[0], ones_of(3, LARGE))
        for handle in handles[1:]:
            await asyncio.to_thread(wait_for, handle.done)
            assert torch.equal(handle.wait(), ones_of(3, LARGE))


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.001)


async def test_who_asks_whether_it_is_done_does_nothing_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event loop asks, and copies must not hold it up."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        with monkeypatch.context() as patched:
            leave_all_to_threads(patched)
            handles = [rank.all_gather(LARGE) for rank in ranks]
            assert not any(handle.done() for _ in range(100) for handle in handles)
            results = await asyncio.gather(*(asyncio.to_thread(handle.wait) for handle in handles))
        assert all(torch.equal(result, LARGE.repeat(2)) for result in results)


async def test_what_a_thread_waits_for_the_attendant_leaves_alone_and_gets_back() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(LARGE)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(handle.wait, 0.05)
        late = ranks[1].all_reduce(LARGE)
        assert torch.equal(await late, ones_of(2, LARGE))  # which needs the first one's work
        assert torch.equal(await handle, ones_of(2, LARGE))


async def test_a_result_that_nobody_has_any_more_is_gone_at_once() -> None:
    """No round, generator or thread keeps the result until the garbage collector runs."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        results = await each_rank(ranks, lambda rank: rank.all_gather(LARGE))
        await each_rank(ranks, lambda rank: rank.barrier())
        gc.collect()
        gc.disable()
        try:
            results = await each_rank(ranks, lambda rank: rank.all_gather(LARGE))
            await each_rank(ranks, lambda rank: rank.barrier())
            traces = [weakref.ref(result) for result in results]
            del results
            assert not any(trace() is not None for trace in traces)
        finally:
            gc.enable()


# --- when it goes wrong


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator["Held"]:
    held = Held(Borrowed.read)
    monkeypatch.setattr(Borrowed, "read", lambda *args: held.read(*args))
    yield held
    held.go.set()


class Held:
    """Holds up every rank that reads a loan."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self.reached = threading.Event()
        self.go = threading.Event()
        self.revoked = False  # what was to be read

    def read(self, borrowed: Borrowed, start: int, target: np.ndarray) -> None:
        self.reached.set()
        assert self.go.wait(10.0)
        try:
            self._read(borrowed, start, target)
        except LoanRevoked:
            self.revoked = True
            raise


async def test_nobody_ends_before_all_have_read(reading: Held) -> None:
    """Otherwise the caller would use memory that others still read."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        lender, reader = (rank.broadcast(LARGE * (rank.rank + 1), 0) for rank in ranks)
        assert await asyncio.to_thread(reading.reached.wait, 10.0)
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(lender.wait, 0.1)
        reading.go.set()
        assert torch.equal(await reader, LARGE)
        await lender


async def test_a_loan_is_over_before_the_caller_knows(reading: Held) -> None:
    """A caller that is told of a failure may write its memory at once. A rank that is about to read it must not take that for the data."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        mine = LARGE.clone()
        lender, reader = ranks[0].broadcast(mine, 0, timeout_s=0.2), ranks[1].broadcast(LARGE.clone(), 0)
        assert await asyncio.to_thread(reading.reached.wait, 10.0)
        with pytest.raises(CollectiveTimeout):
            await lender
        mine.fill_(99.0)
        reading.go.set()
        with pytest.raises(CollectiveError, match="aborted by rank 0"):
            await reader
        assert reading.revoked
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(LARGE)))[1], ones_of(2, LARGE))


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"all_gather_on_node", "broadcast_on_node"}))  # where nobody reads
async def test_a_rank_that_is_lost_in_the_middle(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have its letter, but not yet its data: they are told which rank they miss."""
    step, go = LoanRound.step, threading.Event()

    def step_later(here: LoanRound) -> Any:
        if threading.current_thread().name != "shardnet-attendant-1":
            assert go.wait(10.0)
        return step(here)

    async with local_cluster(3, limits=LIMITS) as ranks:
        monkeypatch.setattr(LoanRound, "step", step_later)
        handles = [KINDS[kind](rank) for rank in ranks]
        ranks[1].abort()
        with pytest.raises(ClosedError):
            await handles[1]
        go.set()
        for handle in (handles[0], handles[2]):
            with pytest.raises(PeerLost, match="rank 1"):
                await handle


async def test_ctrl_c_in_the_middle_ends_it_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        with monkeypatch.context() as patched:
            leave_all_to_threads(patched)
            patched.setattr(Borrowed, "read", interrupt)
            handles = [rank.all_reduce(LARGE) for rank in ranks]
            with pytest.raises(KeyboardInterrupt):
                handles[0].wait()
        with pytest.raises(KeyboardInterrupt):
            handles[0].wait()  # it is over
        with pytest.raises(CollectiveError, match="aborted by rank 0"):
            await handles[1]
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(LARGE)))[1], ones_of(2, LARGE))


async def test_work_that_goes_on_and_on_can_be_failed_and_waited_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop thread can, though the working thread takes the lock again at once; and so can the working thread, by its own clock."""
    pieces, at_work = 0, threading.Event()

    def much(_: LoanRound) -> Course:
        nonlocal pieces
        while pieces < 10_000:
            pieces += 1
            at_work.set()
            time.sleep(0.001)
            yield None

    async with local_cluster(2, limits=LIMITS) as ranks:
        with monkeypatch.context() as patched:
            leave_all_to_threads(patched)
            patched.setattr(LoanRound, "_run", much)
            handle = ranks[0].all_reduce(LARGE)
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(handle.wait, 0.05)
            assert 10 < pieces < 500
            begun = ranks[0]._group.rounds.under_way[0]
            waiting = asyncio.create_task(asyncio.to_thread(handle.wait))
            at_work.clear()
            assert await asyncio.to_thread(at_work.wait, 5.0)
            before = pieces
            ranks[0]._board.loop.call(begun.fail, CollectiveError("told"))
            with pytest.raises(CollectiveError, match="told"):
                await waiting
            assert pieces - before < 50
            late = ranks[0].all_reduce(LARGE, timeout_s=0.1)
            with pytest.raises(CollectiveTimeout):
                await asyncio.to_thread(late.wait)
            assert pieces < 5_000
        for rank in ranks:
            rank.abort()


async def test_a_missing_rank_is_named() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        handles = [rank.all_reduce(LARGE, timeout_s=0.3) for rank in ranks[:2]]
        for handle in handles:
            assert lends(handle)
            with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 of the world .* missing rank 2"):
                await handle
        with pytest.raises(CollectiveError, match="all_reduce #0 was aborted by rank"):
            await ranks[2].all_reduce(LARGE)
