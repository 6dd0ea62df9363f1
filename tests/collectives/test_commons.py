"""One buffer a node: where gathered data lies, who may use its memory again, and what happens where there is none."""

import asyncio
import errno
import operator
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shardnet.backend import Backend, NodeBuffer
from shardnet.backend.cluster import ClusterBackend
from shardnet.collectives.commons import Claim, Commons
from shardnet.collectives.hierarchical import Hierarchical
from shardnet.collectives.letter_round import LetterRound
from shardnet.collectives.loan_round import LoanRound
from shardnet.collectives.round import Course
from shardnet.config import KIB, Limits
from shardnet.errors import (
    ClosedError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    InvalidRankError,
    PeerLost,
    ProtocolError,
    UsageError,
)
from shardnet.pb import mesh_pb2
from shardnet.testing import each_error, each_rank, local_cluster, loopback_cluster
from shardnet.transport.shared_memory import Segment, Stranger, futex, lending
from shardnet.wire import Chunk
from tests.segments import since_now

LIMITS = Limits(chunk_bytes=8 * KIB, window_bytes=32 * KIB, inline_bytes=KIB, eager_bytes=KIB)
ROWS = 5_000
Work = Callable[[Backend], Awaitable[NodeBuffer]]


def gather(rows: int = ROWS, add: float = 0.0) -> Work:
    return lambda rank: rank.all_gather_on_node(torch.full((rows,), rank.rank + add))


def gathered(ranks: int, rows: int = ROWS, add: float = 0.0) -> torch.Tensor:
    return (torch.arange(float(ranks)) + add).repeat_interleave(rows)


def release(buffers: Sequence[NodeBuffer]) -> None:
    for buffer in buffers:
        buffer.release()


@pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")
@pytest.mark.parametrize(("rows", "kind"), [(1024, LetterRound), (1025, LoanRound)])
async def test_what_a_letter_could_hold_as_a_whole_is_sooner_by_letter(rows: int, kind: type) -> None:
    async with local_cluster(2, limits=replace(LIMITS, eager_bytes=8 * KIB)) as ranks:
        handles = [rank.all_gather_on_node(torch.full((rows,), float(rank.rank))) for rank in ranks]
        handles += [rank.broadcast_on_node(torch.full((2 * rows,), float(rank.rank)), 1) for rank in ranks]
        assert {type(handle._future) for handle in handles} == {kind}
        buffers = [await handle for handle in handles]
        for buffer in buffers[:2]:
            assert torch.equal(buffer.tensor, gathered(2, rows))
        for buffer in buffers[2:]:
            assert torch.equal(buffer.tensor, torch.ones(2 * rows))
        release(buffers)


@pytest.fixture
def segments() -> Callable[[], int]:
    return since_now()


@pytest.mark.parametrize("per_node", [2, 3, 4])
async def test_the_ranks_of_a_node_have_it_in_the_same_memory(per_node: int) -> None:
    async with local_cluster(5, ranks_per_node=per_node, limits=LIMITS) as ranks:
        buffers = await each_rank(ranks, gather())
        assert all(torch.equal(buffer.tensor, gathered(5)) for buffer in buffers)
        for rank, buffer in enumerate(buffers):
            neighbours = [other for other in range(5) if other // per_node == rank // per_node and other != rank]
            assert buffer.shared == bool(neighbours)
            for slot in ranks[rank]._group.commons._slots.values():
                slot.segment.shared.view(np.float32)[rank] = 99.0
            for other in range(5):
                assert (buffers[other].tensor[rank] == 99.0) == (other in (rank, *neighbours) and buffer.shared)
        release(buffers)


@pytest.mark.parametrize("root", [0, 3])
@pytest.mark.parametrize("per_node", [2, 3, 5])
async def test_a_broadcast_is_written_once_a_node(per_node: int, root: int) -> None:
    async with local_cluster(5, ranks_per_node=per_node, limits=LIMITS) as ranks:
        given = [torch.arange(ROWS) + rank for rank in range(5)]
        buffers = await each_rank(ranks, lambda rank: rank.broadcast_on_node(given[rank.rank].view(-1, 2), root))
        assert all(torch.equal(buffer.tensor, given[root].view(-1, 2)) for buffer in buffers)
        for rank, buffer in enumerate(buffers):
            neighbours = [other for other in range(5) if other // per_node == rank // per_node and other != rank]
            assert buffer.shared == bool(neighbours)
            assert torch.equal(given[rank], torch.arange(ROWS) + rank), "what a rank gave was written to"
            for slot in ranks[rank]._group.commons._slots.values():
                slot.segment.shared.view(np.int64)[rank] = -99
            seen = [other for other in range(5) if buffers[other].shared and buffers[other].tensor.view(-1)[rank] == -99]
            assert seen == (sorted([rank, *neighbours]) if neighbours else [])
        release(buffers)


async def test_a_broadcast_comes_in_the_tensor_where_no_memory_is_shared() -> None:
    async with local_cluster(3, limits=LIMITS, shared_memory=False) as ranks:
        given = [torch.full((ROWS,), float(rank)) for rank in range(3)]
        buffers = await each_rank(ranks, lambda rank: rank.broadcast_on_node(given[rank.rank], 2))
        assert not any(buffer.shared for buffer in buffers)
        assert all(torch.equal(buffer.tensor, torch.full((ROWS,), 2.0)) for buffer in buffers)
        with pytest.raises(InvalidRankError, match="broadcast root"):
            ranks[0].broadcast_on_node(given[0], 3)
        with pytest.raises(UsageError, match="contiguous"):
            ranks[0].broadcast_on_node(torch.ones(ROWS, 2)[:, 0], 0)


async def test_what_a_rank_writes_only_it_sees_and_not_for_long() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        for turn in range(4):
            buffers = await each_rank(ranks, gather(add=float(turn)))
            assert all(torch.equal(buffer.tensor, gathered(3, add=float(turn))) for buffer in buffers)
            buffers[turn % 3].tensor.numpy()[:] = -1.0
            buffers[(turn + 1) % 3].tensor.mul_(100.0)
            assert torch.equal(buffers[(turn + 2) % 3].tensor, gathered(3, add=float(turn)))
            release(buffers)


async def test_what_nobody_has_any_more_is_released(segments: Callable[[], int]) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        for _ in range(10):
            await each_rank(ranks, gather())  # and drop it
        assert segments() <= 2 * 2 * 3  # the thread that ended the last one may not have dropped it yet when the next begins
        views = [buffer.tensor[5:10] for buffer in await each_rank(ranks, gather())]
        for turn in range(5):
            release(await each_rank(ranks, gather(add=turn + 1.0)))
        assert all(torch.equal(view, torch.zeros(5)) for view in views), "a tensor over the memory still was there"


async def test_results_of_about_one_size_take_turns_in_the_same_memory(segments: Callable[[], int]) -> None:
    """In a training units differ, and memory that was dropped for one of another size has to be cleared by the system each time."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        commons, made = ranks[0]._group.commons, list[int]()
        for turn in range(8):
            for rows in (ROWS // 2 + 1, ROWS - 1, ROWS):
                buffers = await each_rank(ranks, gather(rows, add=turn))
                assert all(torch.equal(buffer.tensor, gathered(2, rows, turn)) for buffer in buffers)
                release(buffers)
            made.append(commons._next_id)
        assert made[3:] == made[3:4] * 5
        assert segments() <= 2 * 2 * 3
        release(await each_rank(ranks, gather(ROWS // 2 - 1)))  # much less would be a waste
        assert commons._next_id == made[-1] + 1


async def test_a_grant_of_less_than_was_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    grant = Commons._grant

    def grant_less(self: Commons, size: int) -> Claim:
        claim = grant(self, size)
        assert claim.slot is not None
        claim.slot.size = 8
        return claim

    async with local_cluster(2, limits=LIMITS) as ranks:
        monkeypatch.setattr(Commons, "_grant", grant_less)
        keepers, own = await each_error(ranks, gather())
        assert isinstance(own, ProtocolError)
        assert isinstance(keepers, CollectiveError)
        for error in (keepers, own):
            assert f"cannot be used: 8 bytes are no room for {2 * 4 * ROWS}" in str(error)


async def test_a_rank_that_shares_no_memory_makes_its_node_do_without() -> None:
    """All of it, whichever rank that is."""
    for apart in range(3):
        async with local_cluster(3, limits=LIMITS, shared_memory=partial(operator.ne, apart)) as ranks:
            buffers = await each_rank(ranks, gather())
            assert not any(buffer.shared for buffer in buffers)
            assert all(torch.equal(buffer.tensor, gathered(3)) for buffer in buffers)


async def test_a_plain_gather_is_another_collective() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:

        def mixed(rank: Backend) -> Any:
            mine = torch.ones(ROWS)
            return rank.all_gather(mine, sizes=[ROWS] * 3) if rank.rank == 1 else rank.all_gather_on_node(mine)

        assert all(isinstance(error, CollectiveMismatch) for error in await each_error(ranks, mixed))


async def test_nobody_copies_what_a_neighbour_has_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(lending.Borrowed, "read", read)
    async with local_cluster(3, limits=LIMITS) as ranks:
        release(await each_rank(ranks, gather()))
        assert [rank.telemetry.bytes_sent for rank in ranks] == [2 * 4 * ROWS] * 3  # to whom it is there


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float64, torch.bool])
@pytest.mark.parametrize("per_node", [1, 2, 4])
async def test_any_sizes_and_dtypes(per_node: int, dtype: torch.dtype) -> None:
    sizes = [3_000, 0, 7_001, 5]
    async with local_cluster(4, ranks_per_node=per_node, limits=LIMITS) as ranks, loopback_cluster(4) as reference:

        async def work(rank: Backend) -> torch.Tensor:
            mine = (torch.arange(sizes[rank.rank] * 3) % 100 + rank.rank).view(-1, 3).to(dtype)
            buffer = await rank.all_gather_on_node(mine, sizes=sizes)
            return buffer.tensor

        expected = await each_rank(reference, work)
        for result in await each_rank(ranks, work):
            assert result.shape == (sum(sizes), 3)
            assert torch.equal(result, expected[0])


async def test_memory_is_used_again_when_all_have_released_it(segments: Callable[[], int]) -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        release(await each_rank(ranks, gather()))
        release(await each_rank(ranks, gather()))  # the others say with their next call what they have released
        mapped = segments()
        for turn in range(20):
            buffers = await each_rank(ranks, gather(add=float(turn)))
            assert torch.equal(buffers[turn % 3].tensor, gathered(3, add=float(turn)))
            release(buffers)
        assert segments() == mapped == 2 * 2 * 3  # two views of each slot


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_a_rank_that_lags_keeps_what_it_reads(segments: Callable[[], int], late: int) -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        kept: list[NodeBuffer] = []
        for turn in range(6):
            buffers = await each_rank(ranks, gather(add=float(turn)))
            kept.append(buffers[late])
            release([buffer for buffer in buffers if buffer is not buffers[late]])
        for turn, buffer in enumerate(kept):
            assert torch.equal(buffer.tensor, gathered(3, add=float(turn)))
        release(kept)
        mapped = segments()
        for turn in range(6):
            release(await each_rank(ranks, gather(add=float(turn))))
        assert segments() <= mapped + 2 * 3  # one more: the keeper hears of what is released with the next call


async def test_no_more_memory_stays_than_was_in_use_at_once(segments: Callable[[], int]) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        for rows in range(ROWS, ROWS + 30):
            release(await each_rank(ranks, gather(rows)))
        assert segments() <= 2 * 3 * 2


async def test_a_large_one_makes_no_room_for_many_small_ones(segments: Callable[[], int]) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        release(await each_rank(ranks, gather(100 * ROWS)))
        for rows in range(ROWS, ROWS + 30):
            release(await each_rank(ranks, gather(rows)))
        assert segments() <= 2 * 3 * 2


async def test_what_was_said_is_not_said_again() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        for rows in range(ROWS, ROWS + 10):
            release(await each_rank(ranks, gather(rows)))
        for rank in ranks:
            commons = rank._group.commons
            assert len(commons._released) + len(commons._dropped) <= 2


async def test_what_nobody_heard_is_said_again(segments: Callable[[], int]) -> None:
    """Rank 2 tells the keeper what it has released, which waits for rank 1 in vain and hears nothing."""
    async with local_cluster(3, limits=LIMITS) as ranks:
        for _ in range(8):
            release(await each_rank(ranks, gather()))
            handles = [ranks[rank].all_gather_on_node(torch.ones(ROWS), timeout_s=0.1) for rank in (0, 2)]
            for handle in handles:
                with pytest.raises(CollectiveError):
                    await handle
            with pytest.raises(CollectiveError):
                await ranks[1].all_gather_on_node(torch.ones(ROWS), timeout_s=0.1)
        release(await each_rank(ranks, gather()))
        assert segments() <= 2 * 3 * 3


async def test_models_that_come_and_go_share_it(segments: Callable[[], int]) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        for _ in range(10):
            groups = [rank.subgroup([0, 1]) for rank in ranks]
            release(await each_rank(groups, gather()))
        assert segments() <= 2 * 2 * 2


async def test_what_is_small_is_not_worth_it() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        buffers = await each_rank(ranks, gather(10))
        assert not any(buffer.shared for buffer in buffers)
        assert torch.equal(buffers[0].tensor, gathered(2, 10))


async def test_released_twice_is_released_once() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        first = await each_rank(ranks, gather())
        release([first[0], first[0], first[0]])
        second = await each_rank(ranks, gather(add=1.0))
        assert torch.equal(first[1].tensor, gathered(2))
        release([first[1], *second])


async def test_without_memory_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with local_cluster(3, limits=LIMITS) as ranks:
        monkeypatch.setattr(os, "posix_fallocate", full)
        for _ in range(2):
            buffers = await each_rank(ranks, gather())
            assert not any(buffer.shared for buffer in buffers)
            assert all(torch.equal(buffer.tensor, gathered(3)) for buffer in buffers)
    (told,) = caplog.records  # once, by the keeper
    assert "[rank 0/3 epoch 1 step 0] no memory in common ([Errno 28] No space left on device), wanted " in told.message
    async with local_cluster(3, limits=LIMITS, shared_memory=False) as ranks:
        assert not any(buffer.shared for buffer in await each_rank(ranks, gather()))


async def test_what_is_released_is_heard_where_there_is_no_memory_for_more() -> None:
    """Rank 1 says what it has released in a gather for which there is no memory, and does not lose it."""

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with local_cluster(2, limits=LIMITS) as ranks:
        release(await each_rank(ranks, gather()))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            assert not any(buffer.shared for buffer in await each_rank(ranks, gather(9 * ROWS)))
        release(await each_rank(ranks, gather()))
        assert len(ranks[0]._group.commons._slots) == 1


async def test_a_grant_is_for_one_piece_of_memory_whatever_its_number() -> None:
    """A rank that was frozen reads of a piece that is gone, and another one of that size has its descriptor."""
    first = Segment(4096)
    granted = (os.getpid(), first.descriptor, first.inode)
    Segment(4096, granted)
    first.close()
    second = Segment(4096)
    assert second.descriptor == granted[1]
    with pytest.raises(Stranger):
        Segment(4096, granted)
    second.close()


async def test_memory_that_a_rank_cannot_map_is_an_error_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Segment.__init__

    def out_of_addresses(segment: Segment, size: int, owner: tuple[int, int] | None = None) -> None:
        if owner is not None:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        make(segment, size)

    async with local_cluster(2, limits=LIMITS) as ranks:
        monkeypatch.setattr(Segment, "__init__", out_of_addresses)
        errors = await each_error(ranks, gather())
        assert all("the memory that rank 0 granted cannot be used: [Errno 12]" in str(error) for error in errors)
        monkeypatch.undo()
        release(await each_rank(ranks, gather()))


async def test_a_keeper_that_is_gone_is_named_and_not_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may end before its streams do: who looks for what it granted finds nobody."""
    make = Segment.__init__

    def gone(segment: Segment, size: int, owner: tuple[int, int] | None = None) -> None:
        if owner is not None:
            raise Stranger
        make(segment, size)

    async with local_cluster(3, limits=LIMITS) as ranks:
        monkeypatch.setattr(Segment, "__init__", gone)
        handles = [rank.all_gather_on_node(torch.ones(ROWS)) for rank in ranks]
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(handles[1].wait, 0.1)
        ranks[0].abort()
        for handle in handles[1:]:
            with pytest.raises(PeerLost, match="rank 0"):
                await handle
        with pytest.raises(ClosedError):
            await handles[0]
        for rank in ranks[1:]:
            rank.abort()


async def test_a_collective_that_fails_gives_its_memory_back(segments: Callable[[], int]) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        for turn in range(12):
            if turn % 2:
                errors = await each_error(ranks, lambda rank: rank.all_gather_on_node(torch.ones(ROWS + rank.rank)))
                assert all(isinstance(error, CollectiveMismatch) for error in errors)
            else:
                with pytest.raises(CollectiveTimeout):
                    await ranks[turn // 2 % 2].all_gather_on_node(torch.ones(ROWS), timeout_s=0.05)
                with pytest.raises(CollectiveError):
                    await ranks[1 - turn // 2 % 2].all_gather_on_node(torch.ones(ROWS), timeout_s=0.05)
            buffers = await each_rank(ranks, gather())
            assert torch.equal(buffers[1].tensor, gathered(2))
            release(buffers)
        assert segments() <= 2 * 3 * 2


async def test_all_nodes_get_the_same_bytes_when_a_shard_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to other nodes is what lies in this one's buffer."""
    shards = [torch.full((ROWS,), float(rank)) for rank in range(4)]
    write = Hierarchical._write_own

    async def then_change(algorithm: Hierarchical) -> None:
        await write(algorithm)
        for shard in shards:
            shard.fill_(99.0)

    async with local_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
        monkeypatch.setattr(Hierarchical, "_write_own", then_change)
        buffers = await each_rank(ranks, lambda rank: rank.all_gather_on_node(shards[rank.rank]))
        assert all(torch.equal(buffer.tensor, buffers[0].tensor) for buffer in buffers)
        release(buffers)


async def test_the_others_go_on_when_a_rank_is_lost() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        buffers = await each_rank(ranks, gather())
        ranks[2].abort()
        for rank in ranks[:2]:
            with pytest.raises(PeerLost, match="rank 2"):
                await rank.all_gather_on_node(torch.ones(ROWS))
        rest = [rank.subgroup([0, 1]) for rank in ranks[:2]]
        release(await each_rank(rest, gather(add=5.0)))
        assert all(torch.equal(buffer.tensor, gathered(3)) for buffer in buffers)
        for rank in ranks[:2]:
            rank.abort()


async def test_what_was_gathered_outlives_the_backend() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        buffers = await each_rank(ranks, gather())
    assert torch.equal(buffers[0].tensor, gathered(2))
    release(buffers)
    del buffers


async def test_many_at_once() -> None:
    async with local_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
        groups = [[rank.subgroup(range(4)) for rank in ranks] for _ in range(2)]

        async def work(rank: ClusterBackend) -> None:
            pending = [groups[turn % 2][rank.rank].all_gather_on_node(torch.full((ROWS,), float(rank.rank + turn))) for turn in range(20)]
            for turn, handle in enumerate(pending):
                buffer = await handle
                assert torch.equal(buffer.tensor, gathered(4, add=float(turn)))
                if turn % 3:
                    buffer.release()

        await asyncio.gather(*map(work, ranks))


@pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")
async def test_what_was_said_to_a_keeper_that_failed_behind_the_others_good_end() -> None:
    """Who has ended well does not say again what it has released: the keeper must have heard it by then."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        release(await each_rank(ranks, gather()))
        commons = ranks[0]._group.commons
        (slot,) = commons._slots
        handles: list[Any] = []
        await_marks = LoanRound.await_marks

        def fail_last(here: LoanRound, marks: Sequence[int]) -> Course:
            yield from await_marks(here, marks)
            if here is handles[0]._future:
                while len(handles) < 2 or not handles[1].done():
                    time.sleep(0.001)
                raise ClosedError("the keeper has failed")

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(LoanRound, "await_marks", fail_last)
            handles.extend(rank.all_gather_on_node(torch.ones(ROWS)) for rank in ranks)
            with pytest.raises(ClosedError):
                await handles[0]
            release([await handles[1]])
        release(await each_rank(ranks, gather()))
        assert list(commons._slots) == [slot]


async def test_word_of_memory_that_was_not_granted_is_refused() -> None:
    """It would count as data that is there."""
    async with local_cluster(2, limits=replace(LIMITS, letter_bytes=0)) as ranks:
        board = ranks[0]._board
        placed = Chunk(1, 0, 0, 2, control=mesh_pb2.Control(placed=mesh_pb2.Placed(size=4 * ROWS)))
        handle = ranks[1].all_gather(torch.ones(ROWS))
        board.loop.call(board.post, 1, placed)
        with pytest.raises(ProtocolError, match="there is no memory that it could share"):
            await handle
        with pytest.raises(CollectiveError):
            await ranks[0].all_gather(torch.ones(ROWS))
