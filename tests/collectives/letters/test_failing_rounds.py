"""Small collectives that go wrong: which rank is told what, and the next ones are unharmed."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.collectives.group import Group
from shardnet.collectives.letters.letter_round import LetterRound
from shardnet.collectives.reduction import Reduction
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import KIB, Timeouts
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost, ProtocolError, ShardnetError
from shardnet.testing import each_error, each_rank, local_cluster
from shardnet.transport.shared_memory import futex, mailbox
from shardnet.wire import Chunk
from tests.collectives.letters.rounds import LARGE, LARGER, LIMITS, SMALL, interrupt, ones_of, result_of
from tests.promises import within_s

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")


Call = Callable[[Backend], Pending[Any]]
MISMATCHES: dict[str, tuple[Call, Call]] = {
    "two rounds": (lambda rank: rank.all_reduce(SMALL), lambda rank: rank.all_gather(SMALL)),
    "a round and a large one": (lambda rank: rank.all_reduce(SMALL), lambda rank: rank.all_reduce(LARGE)),
    "a large one and a round": (lambda rank: rank.all_reduce(LARGE), lambda rank: rank.all_reduce(SMALL)),
    "a round and one that waits for it": (lambda rank: rank.barrier(), lambda rank: rank.all_gather_on_node(LARGER)),
    "a broadcast that nobody answers": (lambda rank: rank.broadcast(LARGE, 2), lambda rank: rank.broadcast(SMALL, 2)),
}


@pytest.mark.parametrize("tensor", [SMALL, LARGE], ids=["a letter", "a loan"])
async def test_a_round_that_begins_after_an_abort_ends_for_nobody(tensor: torch.Tensor) -> None:
    """The loop thread fails it, however late: until then the ranks' own threads could end it among themselves."""
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        free.wait(10.0)

    async with local_cluster(2, limits=LIMITS) as ranks:
        ranks[0]._board.loop.call(hold)
        try:
            assert await asyncio.to_thread(held.wait, 10.0)
            ranks[1].abort()
            handles = [rank.all_reduce(tensor) for rank in ranks]
            waiting = [asyncio.to_thread(handle.wait, 0.2) for handle in handles]
            ends = await asyncio.gather(*waiting, return_exceptions=True)
        finally:
            free.set()
        assert [type(end) for end in ends] == [TimeoutError, TimeoutError]
        with pytest.raises(ClosedError):
            await handles[1]
        with pytest.raises(PeerLost, match="rank 1"):
            await handles[0]


@pytest.mark.parametrize("case", MISMATCHES)
@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize("behind_s", [0.0, 0.15])
async def test_ranks_that_disagree_are_told_within_a_second(case: str, odd: int, behind_s: float) -> None:
    """Whichever rank is the odd one, and whichever comes first."""
    most, other = MISMATCHES[case]
    async with local_cluster(3, limits=LIMITS) as ranks:
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[0], ones_of(3))

        async def work(rank: Backend) -> object:
            if rank.rank == odd:
                await asyncio.sleep(behind_s)
            return await (other if rank.rank == odd else most)(rank)

        start = time.monotonic()
        errors = await each_error(ranks, work)
        assert time.monotonic() - start < behind_s + within_s(1.0)
        for error in errors:
            assert isinstance(error, CollectiveMismatch)
            assert f"rank {odd} is in" in str(error)
            assert "collective #1 of the world" in str(error)
        results = await each_rank(ranks, lambda rank: rank.all_reduce(SMALL))
        assert all(torch.equal(result, ones_of(3)) for result in results)


@pytest.mark.parametrize("threads", [True, False])
async def test_a_missing_rank_is_named_in_time(threads: bool) -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        start = time.monotonic()
        handles = [rank.all_reduce(SMALL, timeout_s=0.5) for rank in ranks[:2]]

        async def fails(handle: Pending[torch.Tensor]) -> ShardnetError:
            with pytest.raises(CollectiveTimeout, match=r"all_reduce #0 of the world .* missing rank 2") as caught:
                await (asyncio.to_thread(handle.wait) if threads else result_of(handle))
            return caught.value

        await asyncio.gather(*map(fails, handles))
        assert 0.5 <= time.monotonic() - start < 0.5 + within_s(0.5)
        with pytest.raises(CollectiveError, match="all_reduce #0 was aborted by rank"):
            await ranks[2].all_reduce(SMALL)
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[2], ones_of(3))


@pytest.mark.parametrize("told", [True, False])
async def test_a_letter_of_a_rank_that_has_given_up_is_not_used(told: bool) -> None:
    """Rank 0 gives up while rank 1 reads, so its caller may change the input again; and rank 0 does not get to say so."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL)
        given_up, late, reduce = ranks[0]._group.rounds.under_way[0], ranks[1]._group, Reduction.reduce

        def reduced(*args: Any) -> None:
            reduce(*args)
            given_up.fail(CollectiveError("rank 0 has given up"))

        theirs = ranks[1].all_reduce(SMALL, timeout_s=0.5)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Reduction, "reduce", reduced)
            assert not theirs.done()
        assert late.rounds.under_way[0]._taken_back
        with pytest.raises(CollectiveError, match="given up"):
            await handle
        if told:
            late.fail(late.rounds.under_way[0], CollectiveError("told by rank 0"))
        with pytest.raises(CollectiveError, match="told by rank 0" if told else "did not end within 0.5 s"):
            await theirs


async def test_a_letter_that_nobody_will_acknowledge_is_taken_back() -> None:
    """Rank 1, whose letter went over its stream, gives up before rank 0 begins. Rank 0 ends well, and only then hears of that."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        group, held, received = ranks[0]._group, [], threading.Event()
        on_chunk = group.on_chunk

        def hold_back(source: int, chunk: Chunk) -> None:
            if chunk.control is not None and chunk.control.HasField("abort"):
                held.append((source, chunk))
                received.set()
            else:
                on_chunk(source, chunk)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(group, "on_chunk", hold_back)
            patched.setattr(ranks[1]._board.mesh.mailbox, "post", lambda *_: None)
            theirs = ranks[1].all_reduce(SMALL, timeout_s=0.1)
            with pytest.raises(CollectiveTimeout):
                await theirs
            assert await asyncio.to_thread(received.wait, 10.0)
            assert torch.equal(await ranks[0].all_reduce(SMALL), ones_of(2))
        mailbox = ranks[0]._board.mesh.mailbox
        assert mailbox is not None
        assert not all(map(mailbox._is_free, mailbox._posted))
        await ranks[0]._board.loop.run_here(_call(on_chunk, *held[0]))
        assert all(map(mailbox._is_free, mailbox._posted))
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[0], ones_of(2))


async def _call(function: Callable[..., object], *args: object) -> None:
    function(*args)


async def test_a_rank_that_is_lost_ends_what_waits_for_it() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        waiting = [asyncio.create_task(asyncio.to_thread(rank.all_reduce(SMALL).wait)) for rank in ranks[:2]]
        await asyncio.sleep(0.1)
        start = time.monotonic()
        ranks[2].abort()
        for each in waiting:
            with pytest.raises(PeerLost, match=r"rank 2 .* lost during all_reduce #0"):
                await each
        assert time.monotonic() - start < within_s(1.0)
        with pytest.raises(PeerLost, match=r"lost during barrier #1"):  # as is what comes after
            await ranks[0].barrier()
        assert [rank._board.mesh.mailboxes[2].gone for rank in ranks[:2]] == [True, True]  # nobody waits for its receipts
        survivors = [rank.subgroup([0, 1]) for rank in ranks[:2]]
        results = await each_rank(survivors, lambda rank: rank.all_reduce(torch.ones(4 * KIB)))
        assert torch.equal(results[0], torch.full((4 * KIB,), 2.0))
        for rank in ranks[:2]:
            rank.abort()


async def test_closing_ends_what_waits() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        waiting = asyncio.create_task(asyncio.to_thread(ranks[0].all_reduce(SMALL).wait))
        await asyncio.sleep(0.05)
        ranks[0].abort()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await ranks[0].all_reduce(SMALL)
        ranks[1].abort()


async def test_a_rank_leaves_when_what_it_has_begun_is_over() -> None:
    """It leaves although nobody waits for that here; and a round that a rank left without is lost."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL)
        closing = asyncio.create_task(ranks[0].aclose())
        await asyncio.sleep(0.05)
        assert not closing.done()
        assert torch.equal(await ranks[1].all_reduce(SMALL), ones_of(2))
        with pytest.raises(PeerLost, match="left the cluster"):
            await ranks[1].all_reduce(SMALL)
        await asyncio.gather(closing, ranks[1].aclose())
        assert torch.equal(await handle, ones_of(2))


async def test_ctrl_c_in_the_middle_of_it_is_told_to_the_others() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        theirs = ranks[1].all_reduce(SMALL)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Reduction, "reduce", interrupt)
            mine = ranks[0].all_reduce(SMALL)
            with pytest.raises(KeyboardInterrupt):
                mine.wait()
        with pytest.raises(KeyboardInterrupt):
            mine.wait()  # it is over
        with pytest.raises(CollectiveError, match="aborted by rank 0"):
            await theirs
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[0], ones_of(2))


async def test_a_letter_that_makes_no_sense_ends_its_round_for_all() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        theirs = ranks[1].all_reduce(SMALL)
        mail = ranks[1]._group.mail
        assert mail is not None
        (posted,) = mail.mailbox._posted
        words = mail.mailbox._words
        words[mailbox._DIRECTORY + posted.entry * mailbox._ENTRY_WORDS + mailbox._DATA_BYTES] = 2**63
        with pytest.raises(ProtocolError, match="a letter of 9223372036854775808 bytes"):
            await asyncio.to_thread(ranks[0].all_reduce(SMALL).wait, 5.0)
        with pytest.raises(CollectiveError, match="aborted by rank 0"):
            await theirs
        assert torch.equal((await each_rank(ranks, lambda rank: rank.all_reduce(SMALL)))[0], ones_of(2))


async def test_nobody_ends_a_round_before_its_letter_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is being written, another thread, whose own round begins, finds all letters of the others."""
    begin, groups = LetterRound.begin, list[Group]()

    def begin_late(self: LetterRound) -> None:
        for group in groups:
            group.rounds.sweep()
        begin(self)

    monkeypatch.setattr(LetterRound, "begin", begin_late)
    async with local_cluster(2, limits=LIMITS) as ranks:
        theirs = ranks[1].all_reduce(SMALL, timeout_s=5.0)
        groups.append(ranks[0]._group)
        for handle in (ranks[0].all_reduce(SMALL), theirs):
            assert torch.equal(await handle, ones_of(2))


@pytest.mark.parametrize("thread", [True, False])
async def test_a_queue_goes_on_behind_one_that_has_failed_in_it(thread: bool) -> None:
    async with local_cluster(2, timeouts=Timeouts.for_tests(), limits=replace(LIMITS, max_outstanding=2)) as ranks:
        handles = [ranks[0].all_reduce(SMALL, timeout_s=10.0) for _ in range(6)]
        waiting = asyncio.create_task(asyncio.to_thread(handles[3].wait) if thread else result_of(handles[3]))
        await asyncio.sleep(0.05)
        group = ranks[0]._group
        group.board.loop.call(group.fail, group.rounds.under_way[3], CollectiveError("told"))
        with pytest.raises(CollectiveError, match="told"):
            await asyncio.wait_for(waiting, 1.0)

        async def follow(number: int) -> torch.Tensor | None:
            try:
                return await ranks[1].all_reduce(SMALL)
            except CollectiveError:
                assert number == 3
                return None

        for number in range(6):
            result = await follow(number)
            assert number == 3 or torch.equal(await handles[number], result if result is not None else SMALL)


async def test_a_member_that_is_lost_before_its_group_is_known() -> None:
    """The thread that hears of the loss does not know the group yet: it is busy when the group is made."""
    async with local_cluster(3, limits=LIMITS) as ranks:
        board, busy = ranks[0]._board, threading.Event()
        board.loop.call(busy.wait, 10.0)
        board.loop.call(board.on_lost, 2, "its connection broke")
        handle = ranks[0].subgroup([0, 2]).all_reduce(SMALL, timeout_s=10.0)
        start = time.monotonic()
        busy.set()
        with pytest.raises(PeerLost, match="rank 2"):
            await handle
        assert time.monotonic() - start < within_s(1.0)
        for rank in ranks:
            rank.abort()


@pytest.mark.parametrize("group_is_new", [True, False])
async def test_who_left_after_a_round_takes_nothing_along(group_is_new: bool) -> None:
    """Rank 1 has read this rank's letter, left its own, ended the round and said goodbye before this rank's loop looks at the round. That
    happens if the loop has yet to hear of the group, or if the round begins after another rank has left."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        board, group = ranks[0]._board, ranks[0]._group
        if group_is_new:
            del board._groups[group.id]
        mine, theirs = (rank.all_reduce(SMALL) for rank in ranks)
        assert torch.equal(theirs.wait(), ones_of(2))
        leaving = asyncio.ensure_future(ranks[1].aclose())
        while not board.is_impaired:  # noqa: ASYNC110 - a collective that waited for it would end this one in passing
            await asyncio.sleep(0)
        await board.loop.run_here(_introduce(board, group))
        assert torch.equal(await mine, ones_of(2))
        await asyncio.gather(leaving, ranks[0].aclose())


async def _introduce(board: Switchboard, group: Group) -> None:
    board._introduce(group)
