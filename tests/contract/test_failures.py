"""Ranks that do not come, go away or are closed: all others are soon told which rank it was, and nothing hangs."""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.config import Limits, Timeouts
from shardnet.errors import ClosedError, CollectiveTimeout, PeerLost, ShardnetError
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.testing import each_error, each_rank, local_cluster
from shardnet.wire import Chunk
from tests.contract.conftest import LIMITS, MakeCluster
from tests.promises import within_s

Ranks = Sequence[Backend]

LOST_WITHIN_S = within_s(1.0)
LATE_S = within_s(0.5)  # beyond a timeout
ADDRESS = r"\((memory:\d+|127\.0\.0\.1:\d+)\)"


def every_kind(rank: Backend, timeout_s: float | None = None) -> list[Pending[Any]]:
    """Each collective, small and large."""
    handles: list[Pending[Any]] = [rank.barrier(timeout_s=timeout_s)]
    for size in (4, 400):
        x = torch.ones(size)
        handles += [
            rank.all_reduce(x, timeout_s=timeout_s),
            rank.all_reduce(x.bfloat16(), timeout_s=timeout_s),
            rank.broadcast(x, 0, timeout_s=timeout_s),
            rank.broadcast(x, 3, timeout_s=timeout_s),
            rank.all_gather(x, timeout_s=timeout_s),
            rank.all_gather(torch.ones(size if rank.rank == 1 else 0), sizes=[0, size, 0, 0], timeout_s=timeout_s),
            rank.reduce_scatter(x, timeout_s=timeout_s),
            rank.all_to_all(x, timeout_s=timeout_s),
        ]
    return handles


async def errors_of(handles: Sequence[Pending[Any]]) -> list[ShardnetError]:
    errors = []
    for handle in handles:
        with pytest.raises(ShardnetError) as caught:
            await handle
        errors.append(caught.value)
    return errors


async def settle(ranks: Ranks) -> None:
    """Wait until all that the ranks have sent each other so far has arrived: pipes keep the order."""
    groups = [rank.subgroup(range(rank.world_size)) for rank in ranks]
    await each_rank(groups, lambda rank: rank.barrier())


class TestTimeout:
    async def test_names_who_is_missing_on_all_that_wait(self, four: Ranks) -> None:
        timeout_s = 0.4
        start = time.monotonic()

        async def work(rank: Backend) -> list[ShardnetError]:
            return await errors_of(every_kind(rank, timeout_s))

        for errors in await each_rank(four[:3], work):
            for error in errors:
                assert isinstance(error, CollectiveTimeout)
                assert error.missing == (3,)
                assert re.search(r"#\d+ of the world did not end within 0.4 s: missing rank 3 \(at #\d+, last entered ", str(error))
        assert timeout_s <= time.monotonic() - start < timeout_s + LATE_S
        await settle(four)
        start = time.monotonic()
        late = await errors_of(every_kind(four[3], 60.0))  # the late rank is told as soon as it calls
        assert all(isinstance(error, CollectiveTimeout) for error in late)
        assert time.monotonic() - start < LATE_S
        sums = await each_rank(four, lambda rank: rank.all_reduce(torch.ones(400)))
        assert all((each == 4).all() for each in sums)

    async def test_says_where_the_missing_rank_is(self, four: Ranks) -> None:
        await each_rank(four, lambda rank: rank.all_gather(torch.ones(2), label="the last one"))
        for error in await each_error(four[1:], lambda rank: rank.barrier(timeout_s=0.1)):
            assert re.search(r"missing rank 0 \(at #\d+, last entered all_gather\(float32 \[2\]\) of the last one\)", str(error))
        await settle(four)
        await each_error(four[:1], lambda rank: rank.barrier())

    async def test_names_several(self, four: Ranks) -> None:
        for error in await each_error([four[2]], lambda rank: rank.barrier(timeout_s=0.1)):
            assert isinstance(error, CollectiveTimeout)
            assert error.missing == (0, 1, 3)
        await settle(four)
        await each_error([four[0], four[1], four[3]], lambda rank: rank.barrier())

    async def test_of_a_send_and_of_a_receive(self, pair: Ranks) -> None:
        for start in (lambda: pair[0].send(torch.ones(2), 1, timeout_s=0.1), lambda: pair[1].recv(torch.ones(2), 0, timeout_s=0.1)):
            handle: Pending[Any] = start()
            where = rf"{handle.op_name} #\d+ of the channel from rank 0 to rank 1 did not end within 0.1 s: missing rank"
            with pytest.raises(CollectiveTimeout, match=where):
                await handle
            await settle(pair)
            other = pair[1].recv(torch.ones(2), 0) if handle.op_name == "send" else pair[0].send(torch.ones(2), 1)
            await errors_of([other])
        sent, received = pair[0].send(torch.ones(2), 1), pair[1].recv(torch.zeros(2), 0)
        await sent
        assert (await received).tolist() == [1, 1]
        with pytest.raises(CollectiveTimeout, match=r"send #0 of the channel 'some tag' from rank 1 to rank 0 did not end within 0.1 s"):
            await pair[1].send(torch.ones(2), 0, tag="some tag", timeout_s=0.1)
        await settle(pair)

    async def test_counts_from_the_call(self, fresh: MakeCluster) -> None:
        """Collectives that wait for their turn do not time out one after the other."""
        timeout_s = 0.3
        async with fresh(2, limits=Limits(max_outstanding=2)) as ranks:
            start = time.monotonic()
            errors = await errors_of([ranks[0].barrier(timeout_s=timeout_s) for _ in range(20)])
            assert all(isinstance(error, CollectiveTimeout) for error in errors)
            assert time.monotonic() - start < timeout_s + LATE_S
            await settle(ranks)
            await errors_of([ranks[1].barrier() for _ in range(20)])
            await each_rank(ranks, lambda rank: rank.barrier())

    async def test_default_is_the_backends(self, fresh: MakeCluster) -> None:
        async with fresh(2, timeouts=Timeouts(collective_s=0.2)) as ranks:
            with pytest.raises(CollectiveTimeout, match=r"within 0.2 s"):
                await ranks[0].barrier()


class TestLost:
    async def test_an_abort_names_rank_address_and_collective(self, fresh: MakeCluster) -> None:
        async with fresh(4) as ranks:
            await each_rank(ranks, lambda rank: rank.barrier())
            waiting = {rank.rank: every_kind(rank) for rank in ranks if rank.rank != 2}
            own = ranks[2].recv(torch.ones(3), 0)
            start = time.monotonic()
            ranks[2].abort()
            for number, handles in waiting.items():
                for error, handle in zip(await errors_of(handles), handles, strict=True):
                    assert isinstance(error, PeerLost)
                    assert error.rank == 2
                    assert str(error).startswith(f"[rank {number}/4 epoch 1 step 0] ")
                    assert re.search(rf"rank 2 {ADDRESS} lost during {handle.op_name} #\d+: ", str(error))
            assert time.monotonic() - start < LOST_WITHIN_S
            with pytest.raises(ClosedError):
                await own

    async def test_what_it_says_last_is_what_the_others_are_told(self, fresh: MakeCluster) -> None:
        async with fresh(4) as ranks:
            await each_rank(ranks, lambda rank: rank.barrier())
            waiting = {rank.rank: every_kind(rank) for rank in ranks if rank.rank != 2}
            ranks[2].abort("its disk is\x07 full")
            for handles in waiting.values():
                for error in await errors_of(handles):
                    assert re.search(rf"rank 2 {ADDRESS} lost during \w+ #\d+: its disk is(\x07|\\x07) full$", str(error))

    async def test_later_collectives_fail_at_once(self, fresh: MakeCluster) -> None:
        async with fresh(3) as ranks:
            first = [rank.barrier() for rank in ranks[:2]]
            ranks[2].abort()
            await errors_of(first)
            start = time.monotonic()
            for rank in ranks[:2]:
                later: list[Pending[Any]] = [rank.all_reduce(torch.ones(400)), rank.recv(torch.ones(1), 2)]
                later.append(rank.barrier())
                for error in await errors_of(later):
                    assert isinstance(error, PeerLost)
            assert time.monotonic() - start < LOST_WITHIN_S

    async def test_the_others_go_on_without(self, fresh: MakeCluster) -> None:
        """A group that the lost rank is no member of does not notice."""
        async with fresh(4) as ranks:
            groups = [ranks[rank].subgroup([0, 1, 3]) for rank in (0, 1, 3)]
            before = [group.all_reduce(torch.ones(400)) for group in groups[:2]]
            waiting = [rank.barrier() for rank in ranks[:2]]
            ranks[2].abort()
            await errors_of(waiting)
            before.append(groups[2].all_reduce(torch.ones(400)))
            assert [(await handle)[0].item() for handle in before] == [3.0] * 3
            sums = await each_rank(groups, lambda rank: rank.all_reduce(torch.ones(3)))
            assert [each.tolist() for each in sums] == [[3.0] * 3] * 3

    async def test_in_the_middle_of_the_data(self, fresh: MakeCluster) -> None:
        """Hundreds of chunks are on their way when a rank goes. (tests/collectives does this with rounds, which have no chunks.)"""
        async with fresh(3, limits=replace(LIMITS, letter_bytes=0)) as ranks:
            large = [rank.all_reduce(torch.ones(100_000)) for rank in ranks]
            await LoopThread.shared().run_here(_abort_after(ranks[1], sent_bytes=10_000))
            for handle, kind in zip(large, (PeerLost, ClosedError, PeerLost), strict=True):
                with pytest.raises(kind):
                    await handle

    async def test_what_waits_for_its_turn_fails_too(self, fresh: MakeCluster) -> None:
        async with fresh(2, limits=Limits(max_outstanding=2)) as ranks:
            handles = [ranks[0].barrier() for _ in range(20)]
            ranks[1].abort()
            assert all(isinstance(error, PeerLost) for error in await errors_of(handles))

    async def test_all_abort_at_once(self, fresh: MakeCluster) -> None:
        async with fresh(4) as ranks:
            handles = [handle for rank in ranks for handle in every_kind(rank)]
            for rank in ranks:
                rank.abort()
            for handle in handles:
                error = await asyncio.to_thread(handle.exception)
                assert error is None or isinstance(error, (ClosedError, PeerLost))


class TestLeaving:
    async def test_the_others_are_told_at_once(self, fresh: MakeCluster) -> None:
        async with fresh(3) as ranks:
            await each_rank(ranks, lambda rank: rank.barrier())
            waiting: list[Pending[Any]] = [rank.barrier() for rank in ranks[:2]]
            waiting += [rank.all_reduce(torch.ones(400)) for rank in ranks[:2]]
            start = time.monotonic()
            leaving = asyncio.ensure_future(ranks[2].aclose())
            for error in await errors_of(waiting):
                assert isinstance(error, PeerLost)
                assert error.rank == 2
                assert re.search(rf"rank 2 {ADDRESS} lost during .* #\d: it left the cluster without entering this", str(error))
            for error in await each_error(ranks[:2], lambda rank: rank.barrier()):
                assert isinstance(error, PeerLost)
                assert "it left the cluster" in str(error)
            assert time.monotonic() - start < LOST_WITHIN_S
            await asyncio.gather(leaving, *(rank.aclose() for rank in ranks[:2]))

    async def test_what_was_started_ends_first(self, fresh: MakeCluster) -> None:
        """Closing waits for the other ranks, which have not even called yet."""
        async with fresh(4) as ranks:
            mine = every_kind(ranks[3])
            leaving = asyncio.ensure_future(ranks[3].aclose())
            await ranks[0].subgroup([0]).barrier()
            theirs = await each_rank(ranks[:3], lambda rank: _wait_all(every_kind(rank)))
            assert len(theirs) == 3
            await _wait_all(mine)
            with pytest.raises(PeerLost, match="rank 3"):
                await ranks[0].barrier()
            await asyncio.gather(leaving, *(rank.aclose() for rank in ranks[:3]))

    async def test_nobody_ends_before_all_have_entered(self, fresh: MakeCluster) -> None:
        """A rank that is done and leaves must not take away what a late rank still needs, such as the data of a broadcast's root."""
        for shares in ([400, 0, 0, 0], [0, 0, 0, 400]):
            async with fresh(4) as ranks:
                x = torch.ones(400)
                early = [(ranks[0].broadcast(x, 0), ranks[0].all_gather(torch.ones(shares[0]), sizes=shares))]
                early += [(rank.broadcast(x, 0), rank.all_gather(torch.ones(shares[rank.rank]), sizes=shares)) for rank in ranks[1:3]]
                leaving = [asyncio.ensure_future(rank.aclose()) for rank in ranks[:3]]
                with pytest.raises(TimeoutError):
                    early[0][0].wait(0.05)
                late = ranks[3].broadcast(x, 0), ranks[3].all_gather(torch.ones(shares[3]), sizes=shares)
                for handle in [each for both in [*early, late] for each in both]:
                    assert (await handle).sum() == 400
                await asyncio.gather(*leaving, ranks[3].aclose())

    async def test_all_at_once_is_quick(self, fresh: MakeCluster) -> None:
        start = time.monotonic()
        async with fresh(4) as ranks:
            await each_rank(ranks, lambda rank: rank.barrier())
            start = time.monotonic()
            await asyncio.gather(*(rank.aclose() for rank in ranks))
            assert time.monotonic() - start < LATE_S

    async def test_after_a_loss(self, fresh: MakeCluster) -> None:
        """Nobody waits for the goodbye of a rank that is gone."""
        async with fresh(3) as ranks:
            waiting = [rank.barrier() for rank in ranks[:2]]
            ranks[2].abort()
            await errors_of(waiting)
            start = time.monotonic()
            await asyncio.gather(*(rank.aclose() for rank in ranks))
            assert time.monotonic() - start < LATE_S


class TestClosed:
    @pytest.mark.parametrize("way", ["close", "abort"])
    @pytest.mark.parametrize("size", [1, 3])
    async def test_every_call_says_so(self, fresh: MakeCluster, way: str, size: int) -> None:
        async with fresh(size) as ranks:
            if way == "close":
                await asyncio.gather(*(rank.aclose() for rank in ranks))
            else:
                ranks[0].abort()
            x = torch.ones(2 * size)
            calls: list[Callable[[], Pending[Any]]] = [
                lambda: ranks[0].all_reduce(x),
                lambda: ranks[0].broadcast(x, 0),
                lambda: ranks[0].all_gather(x),
                lambda: ranks[0].all_gather(torch.ones(0)),
                lambda: ranks[0].reduce_scatter(x),
                lambda: ranks[0].all_to_all(x),
                lambda: ranks[0].barrier(),
                lambda: ranks[0].subgroup([0]).barrier(),
            ]
            if size > 1:
                calls += [lambda: ranks[0].send(x, 1), lambda: ranks[0].recv(x, 1)]
            for call in calls:
                # until the loop thread has ended the operations under way, a new call fails with those
                words = "the backend is closed" if way == "close" else "the backend (is closed|was aborted)"
                with pytest.raises(ClosedError, match=rf"\[rank 0/{size} epoch 1 step 0\] {words}"):
                    await call()

    async def test_closing_again_changes_nothing(self, fresh: MakeCluster) -> None:
        async with fresh(2) as ranks:
            await asyncio.gather(*(rank.aclose() for rank in [*ranks, *ranks]))
            for rank in ranks:
                await rank.aclose()
                rank.abort()
                await rank.aclose()

    async def test_abort_while_closing_ends_the_wait(self, fresh: MakeCluster) -> None:
        """A closing rank waits for its collectives; a second signal must end that wait."""
        async with fresh(2) as ranks:
            stuck = ranks[0].barrier()
            closing = asyncio.ensure_future(ranks[0].aclose())
            await asyncio.sleep(0)
            ranks[0].abort()
            with pytest.raises(ClosedError):
                await stuck
            await asyncio.wait_for(closing, 5.0)

    async def test_it_does_not_wait_for_receives_to_which_nobody_sends(self, fresh: MakeCluster) -> None:
        async with fresh(2, limits=Limits(max_outstanding=2)) as ranks:
            waiting: list[Pending[Any]] = []
            for rank in ranks:
                waiting += [rank.recv(torch.ones(3), 1 - rank.rank) for _ in range(3)]
                waiting += [rank.recv_any(torch.ones(3, device="cpu"), tag="any") for _ in range(2)]
            async with asyncio.timeout(LATE_S):
                await asyncio.gather(*(rank.aclose() for rank in ranks))
                kinds = {type(error) for error in await errors_of(waiting)}
            assert ClosedError in kinds
            assert kinds <= {ClosedError, PeerLost}, "who closes a moment later may hear of the other's goodbye before"

    async def test_what_was_announced_before_arrives(self, fresh: MakeCluster) -> None:
        async with fresh(2) as ranks:
            sent = [ranks[0].send(torch.full((400,), 7.0), 1, tag=tag) for tag in ("named", "any")]
            later, last = ranks[0].send(torch.ones(1), 1), torch.zeros(1)
            await ranks[1].recv(last, 0)  # comes after the announcements of the two others
            await later
            named, whatever = torch.zeros(400), torch.zeros(400, device="cpu")
            received = ranks[1].recv(named, 0, tag="named"), ranks[1].recv_any(whatever, tag="any")
            await asyncio.gather(*(rank.aclose() for rank in ranks))
            await asyncio.gather(*sent, *received)
            assert (named.mean().item(), whatever.mean().item()) == (7.0, 7.0)

    async def test_it_waits_for_sends_and_meanwhile_receives(self, fresh: MakeCluster) -> None:
        async with fresh(2) as ranks:
            got, theirs = torch.zeros(400), torch.zeros(400)
            sent, received = ranks[0].send(torch.ones(400), 1), ranks[0].recv(got, 1)
            closing = asyncio.ensure_future(ranks[0].aclose())
            await ranks[1].send(torch.ones(400), 0)
            assert not closing.done()
            await ranks[1].recv(theirs, 0)
            await asyncio.gather(sent, received, closing, ranks[1].aclose())
            assert (got.mean().item(), theirs.mean().item()) == (1.0, 1.0)

    async def test_cancelling_a_close_leaves_it_to_be_closed_again(self, fresh: MakeCluster) -> None:
        async with fresh(2) as ranks:
            handle = ranks[0].barrier()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await ranks[0].aclose()
            await ranks[1].barrier()
            await handle  # it went on
            await asyncio.gather(*(rank.aclose() for rank in ranks))

    async def test_abort_during_all_reduce_from_a_thread(self, fresh: MakeCluster) -> None:
        async with fresh(2) as ranks:
            handles = [ranks[0].all_reduce(torch.ones(size)) for size in (1, 1000)]
            await asyncio.to_thread(ranks[0].abort)
            for handle in handles:
                with pytest.raises(ClosedError):
                    handle.wait(5.0)


async def _abort_after(rank: Backend, sent_bytes: int) -> None:
    """Abort a rank as soon as it has sent `sent_bytes`. Runs on the loop thread, so nothing happens between looking and aborting."""
    while rank.telemetry.bytes_sent < sent_bytes:  # noqa: ASYNC110 - a counter tells nobody when it changes
        await asyncio.sleep(0)
    rank.abort()


async def _wait_all(handles: Sequence[Pending[Any]]) -> int:
    for handle in handles:
        await handle
    return len(handles)


@pytest.mark.parametrize("last_words", ["", "its disk is full"])
async def test_who_left_because_it_lost_another_is_not_blamed(last_words: str) -> None:
    """Rank 1 loses rank 2 and leaves before rank 0 has noticed anything: rank 0 is told whom rank 1 had lost, and what that one said."""
    why = last_words or "rank 1 lost contact with it, and left"
    async with local_cluster(3) as ranks:
        barrier = ranks[0].barrier()
        board = ranks[1]._board

        async def lose() -> None:
            board.on_lost(2, last_words or "its connection broke", told=bool(last_words))

        await board.loop.run_here(lose())
        ranks[1].abort()
        with pytest.raises(PeerLost, match=rf"rank 2 \(127\.0\.0\.1:\d+\) lost during barrier #0: {why}") as caught:
            await barrier
        assert caught.value.rank == 2
        for rank in ranks:
            rank.abort()


async def test_words_of_ranks_that_there_are_not_are_not_kept() -> None:
    """A peer could send them without end."""
    async with local_cluster(2) as ranks:
        board = ranks[0]._board

        async def hear() -> None:
            loss = mesh_pb2.Loss(rank=7, last_words="boom")
            board.on_chunk(1, Chunk(board.mesh.epoch, 0, 0, control=mesh_pb2.Control(loss=loss)))

        await board.loop.run_here(hear())
        assert board.last_words(7) == ""
