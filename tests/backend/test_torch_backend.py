"""What a backend over torch guarantees beyond the contract: how its process groups end."""

import asyncio
import threading
import time

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from shardnet.backend.line import Place
from shardnet.backend.torch_backend import TorchBackend
from shardnet.backend.torch_source import TorchSource
from shardnet.collectives.operation import Operation
from shardnet.collectives.roll_call import Attendance
from shardnet.config import NodeEngine
from shardnet.errors import ClosedError, CollectiveError, CollectiveTimeout, PeerLost, StateError
from shardnet.loop import LoopThread
from shardnet.testing import each_error, each_rank
from tests.backend.torch_ranks import torch_cluster
from tests.promises import within_s

LARGE = 1_000_000  # elements of float32, too many to go over the mesh
LOST_WITHIN_S = within_s(1.0)


async def hold_up(rank: TorchBackend) -> Place:
    """Take a place in a rank's line and keep it: operations after it are agreed on, but only the other ranks launch them."""

    async def take() -> Place:
        return rank._whole.line.place()

    return await LoopThread.shared().run_here(take())


def threads() -> int:
    """Other tests of this process may have a cluster with some, too."""
    return sum(thread.name.startswith("shardnet-torch-") for thread in threading.enumerate())


async def test_a_rank_that_dies_behind_the_launch() -> None:
    """The others wait in torch for a rank that has agreed and does not come."""
    async with torch_cluster(TorchBackend, 3) as ranks:
        await each_rank(ranks, lambda rank: rank.all_reduce(torch.ones(LARGE)))
        await hold_up(ranks[1])
        handles = [rank.all_gather(torch.ones(LARGE)) for rank in ranks for _ in range(2)]
        groups = [ranks[rank].subgroup([0, 2]) for rank in (0, 2)]
        with pytest.raises(TimeoutError):
            handles[0].wait(0.1)
        start = time.monotonic()
        ranks[1].abort()
        for number, handle in enumerate(handles):
            with pytest.raises(ClosedError if number // 2 == 1 else PeerLost):
                await handle
        assert time.monotonic() - start < LOST_WITHIN_S
        sums = await each_rank(groups, lambda rank: rank.all_reduce(torch.ones(LARGE)))
        assert all((each == 2).all() for each in sums)
        with pytest.raises(PeerLost):
            await ranks[0].all_gather(torch.ones(LARGE))


async def test_a_timeout_behind_the_launch_ends_the_process_group_of_all() -> None:
    """Later calls on the group say so; barriers, small collectives and other groups go on."""
    async with torch_cluster(TorchBackend, 3) as ranks:
        await hold_up(ranks[2])
        first = [rank.all_gather(torch.ones(LARGE), timeout_s=0.3) for rank in ranks]
        beside = [rank.all_gather(torch.ones(LARGE)) for rank in ranks]
        for handle in first:
            with pytest.raises(CollectiveTimeout):
                await handle
        for handle in beside:
            with pytest.raises(CollectiveError, match=r"all_gather #1.*(cannot go on|torch process group)"):
                await handle
        for error in await each_error(ranks, lambda rank: rank.all_reduce(torch.ones(LARGE))):
            assert isinstance(error, CollectiveError)
            assert "has no torch process group any more, because all_gather #0 failed;" in str(error)
            assert "make a new sub-group, or reform the cluster" in str(error)
        await each_rank(ranks, lambda rank: rank.all_reduce(torch.ones(3)))
        groups = [rank.subgroup(range(3)) for rank in ranks]
        await each_rank(groups, lambda rank: rank.all_reduce(torch.ones(LARGE)))


async def test_who_is_done_hears_that_another_has_failed_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 only launch, as on a GPU, and the GPU would wait for rank 2."""
    async with torch_cluster(TorchBackend, 3) as ranks:
        await each_rank(ranks, lambda rank: rank.all_reduce(torch.ones(LARGE)))
        await hold_up(ranks[2])
        for rank in ranks[:2]:
            monkeypatch.setattr(rank._torch, "gather", lambda *_: None)
        handles = [rank.all_gather(torch.ones(LARGE), timeout_s=0.3) for rank in ranks]
        for handle in handles[:2]:
            await handle
        with pytest.raises(CollectiveTimeout):
            await handles[2]
        for rank in ranks[:2]:  # throw their process groups away, and have not asked for anything
            end = rank._whole.line.ended
            assert end is not None
            await asyncio.wait_for(LoopThread.shared().run_here(_ended(end)), 5.0)
        for error in await each_error(ranks[:2], lambda rank: rank.all_reduce(torch.ones(LARGE))):
            assert "because collective #1 failed on another rank" in str(error)


async def test_who_hears_that_another_has_given_up_hears_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 gives up making the process group, and rank 1 sees that before rank 0 has said why."""
    async with torch_cluster(TorchBackend, 3) as ranks:
        await hold_up(ranks[2])
        seen, hold, throw_away = asyncio.Event(), ranks[0]._group.roll_call.hold, ranks[1]._throw_away

        async def say_later(sequence: int) -> Attendance:
            await seen.wait()
            return await hold(sequence)

        async def see(op: Operation, error: BaseException) -> None:
            assert isinstance(error, StateError)
            seen.set()
            await throw_away(op, error)

        monkeypatch.setattr(ranks[0]._group.roll_call, "hold", say_later)
        monkeypatch.setattr(ranks[1], "_throw_away", see)
        handles = [rank.all_gather(torch.ones(LARGE), timeout_s=0.3 if rank.rank == 0 else 10.0) for rank in ranks]
        for handle in handles:
            with pytest.raises(CollectiveTimeout):
                await handle


async def test_a_group_that_nobody_has_any_more_gives_back_what_it_had() -> None:
    before = threads()
    async with torch_cluster(TorchBackend, 2) as ranks:
        groups = [rank.subgroup(range(2)) for rank in ranks]
        await each_rank(groups, lambda rank: rank.all_reduce(torch.ones(LARGE)))
        assert threads() == before + 2
        ends = [group._whole.line.ended for group in groups if isinstance(group, TorchBackend)]
        groups.clear()
        for end in ends:
            assert end is not None
            await asyncio.wait_for(LoopThread.shared().run_here(_ended(end)), 5.0)
        assert threads() == before


async def _ended(end: "asyncio.Future[None]") -> None:
    await asyncio.shield(end)


async def test_nothing_is_made_before_it_is_needed() -> None:
    before = threads()
    async with torch_cluster(TorchBackend, 2) as ranks:
        await each_rank(ranks, lambda rank: rank.all_reduce(torch.ones(3)))
        await each_rank(ranks, lambda rank: rank.barrier())
        assert threads() == before


async def test_bytes_are_counted() -> None:
    async with torch_cluster(TorchBackend, 2) as ranks:
        await each_rank(ranks, lambda rank: rank.all_gather(torch.ones(LARGE)))
        for rank in ranks:
            traffic = rank.telemetry.peers[1 - rank.rank]
            assert (traffic.sent_memory, traffic.received_memory) == (4 * LARGE, 4 * LARGE)


async def test_a_process_group_is_made_by_all_or_by_none() -> None:
    """A rank that gives up while another has yet to come also ends that one's wait; torch itself would wait for long."""
    store = HashStore()
    source = TorchSource(NodeEngine.GLOO, lambda: store)
    with pytest.raises(StateError, match="gave up before all ranks had arrived"):
        await asyncio.to_thread(source.make, "one", 0, 2, lambda: False)
    with pytest.raises(StateError, match="gave up before all ranks had arrived"):
        await asyncio.to_thread(source.make, "one", 1, 2, lambda: True)
    both = await asyncio.gather(*(asyncio.to_thread(source.make, "other", rank, 2, lambda: True) for rank in range(2)))
    assert [group.size() for group in both] == [2, 2]
