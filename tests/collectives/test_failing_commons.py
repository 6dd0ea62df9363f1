"""One buffer per node: what happens if there is no memory for it, or if a rank breaks the rules or is gone."""

import asyncio
import errno
import operator
import os
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from shardnet.backend import Backend
from shardnet.collectives.commons import Claim, Commons
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, PeerLost, ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.testing import each_error, each_rank, local_cluster
from shardnet.transport.shared_memory import Segment, Stranger
from shardnet.wire import Chunk
from tests.collectives.commons import LIMITS, ROWS, gather, gathered, release


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
            assert f"cannot be used: it has 8 bytes, and {2 * 4 * ROWS} are needed" in str(error)


async def test_a_rank_that_shares_no_memory_makes_its_node_do_without() -> None:
    """The whole node, whichever rank that is."""
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
    assert "[rank 0/3 epoch 1 step 0] no shared memory ([Errno 28] No space left on device) for " in told.message
    async with local_cluster(3, limits=LIMITS, shared_memory=False) as ranks:
        assert not any(buffer.shared for buffer in await each_rank(ranks, gather()))


async def test_a_grant_is_for_one_piece_of_memory_whatever_its_number() -> None:
    """A rank that was frozen reads about a piece that is gone, while another piece of that size has its descriptor."""
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
    """Its process may end before its streams do: a rank that looks for the granted memory finds no process."""
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


async def test_word_of_memory_that_was_not_granted_is_refused() -> None:
    """Otherwise it would count as data that is there."""
    async with local_cluster(2, limits=replace(LIMITS, letter_bytes=0)) as ranks:
        board = ranks[0]._board
        placed = Chunk(1, 0, 0, 2, control=mesh_pb2.Control(placed=mesh_pb2.Placed(size=4 * ROWS)))
        handle = ranks[1].all_gather(torch.ones(ROWS))
        board.loop.call(board.post, 1, placed)
        with pytest.raises(ProtocolError, match="but shares no memory with this rank"):
            await handle
        with pytest.raises(CollectiveError):
            await ranks[0].all_gather(torch.ones(ROWS))
