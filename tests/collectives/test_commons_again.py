"""One buffer per node: who may use its memory again, and when."""

import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardnet.backend import NodeBuffer
from shardnet.collectives.letters.loan_round import LoanRound
from shardnet.collectives.letters.round import Course
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, CollectiveTimeout
from shardnet.testing import each_error, each_rank, local_cluster
from shardnet.transport.shared_memory import futex
from tests.collectives.commons import LIMITS, ROWS, gather, gathered, release
from tests.segments import since_now


@pytest.fixture
def segments() -> Callable[[], int]:
    return since_now()


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
    """In a training units differ. If a buffer were dropped for one of another size, the system would have to clear new memory each time."""
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


async def test_memory_is_used_again_when_all_have_released_it(segments: Callable[[], int]) -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        release(await each_rank(ranks, gather()))
        release(await each_rank(ranks, gather()))  # the others say what they have released with their next call
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


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_what_is_released_for_good_is_given_back(segments: Callable[[], int], late: int) -> None:
    """It is given back once all ranks have released it, and so is other memory that would fit into the same room."""
    async with local_cluster(3, limits=LIMITS) as ranks:
        whole = [await each_rank(ranks, gather(add=float(turn))) for turn in range(10)]
        for buffers in whole:
            buffers[(late + 1) % 3].release(keep=False)
            buffers[late - 1].release(keep=False)
        for turn in range(3):
            release(await each_rank(ranks, gather(add=float(turn))))
        assert segments() >= 2 * 3 * 10  # one still reads
        for turn, buffers in enumerate(whole):
            assert torch.equal(buffers[late].tensor, gathered(3, add=float(turn)))
            buffers[late].release(keep=False)
        whole.clear()
        del buffers
        for turn in range(5):
            buffers = await each_rank(ranks, gather(add=float(turn)))
            assert torch.equal(buffers[late].tensor, gathered(3, add=float(turn)))
            release(buffers)
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
    """Rank 2 tells the keeper what it has released, but the keeper waits for rank 1 in vain and hears nothing."""
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


async def test_released_twice_is_released_once() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        first = await each_rank(ranks, gather())
        release([first[0], first[0], first[0]])
        second = await each_rank(ranks, gather(add=1.0))
        assert torch.equal(first[1].tensor, gathered(2))
        release([first[1], *second])


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


@pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")
async def test_what_was_said_to_a_keeper_that_failed_behind_the_others_good_end() -> None:
    """A rank that has ended well does not repeat what it has released: by then the keeper must have heard it."""
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
