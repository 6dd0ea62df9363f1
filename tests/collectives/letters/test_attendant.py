"""The thread that looks after rounds for which no thread waits: it is woken when there is something to do, and sleeps otherwise."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, NodeBuffer, Pending
from shardnet.collectives.letters import attendant
from shardnet.collectives.letters.attendant import Attendant
from shardnet.collectives.letters.rounds import Rounds
from shardnet.errors import ClosedError
from shardnet.testing import each_rank, local_cluster
from shardnet.transport.shared_memory import MailboxView, futex
from shardnet.transport.shared_memory.mailbox import Mailbox
from tests.collectives.letters.rounds import LARGE, LARGER, LIMITS, SMALL, ones_of, result_of

pytestmark = pytest.mark.skipif(futex.most < 8, reason="sleeping at several words needs Linux 5.16 on x86-64")


def many(rank: Backend) -> list[Pending[Any]]:
    large: list[Pending[Any]] = [rank.all_reduce(LARGER), rank.reduce_scatter(LARGER), rank.all_to_all(LARGER)]
    gathered: list[Pending[Any]] = [rank.all_gather(LARGE), rank.all_gather_on_node(LARGE), rank.broadcast(LARGE.clone(), 1)]
    return [*large, *gathered, rank.all_reduce(SMALL)]


@pytest.mark.parametrize("room", [1, 2, 3])
async def test_it_misses_nothing_however_long_it_would_sleep(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It misses no letters, marks and receipts, some of which find no room in a mailbox and come over a stream; and no rounds whose turn
    comes when others end."""
    monkeypatch.setattr(attendant, "SLICE_S", 60.0)
    posted, post = 0, Mailbox.post

    def post_some(self: Mailbox, *args: Any) -> Any:
        nonlocal posted
        posted += 1
        return post(self, *args) if room == 1 or posted % room else None

    monkeypatch.setattr(Mailbox, "post", post_some)
    async with local_cluster(3, limits=replace(LIMITS, max_outstanding=3)) as ranks, asyncio.timeout(40.0):
        for _ in range(10):
            handles = [many(rank) for rank in ranks]
            for handle in (each for of_rank in handles for each in of_rank):
                result = await handle
                if isinstance(result, NodeBuffer):
                    result.release()
            assert torch.equal(await handles[2][0], ones_of(3, LARGER))
    assert posted >= 3 * 10 * 7


@pytest.mark.parametrize("moment_s", [attendant.MOMENT_S, 60.0])
async def test_a_thread_that_gives_up_waiting_hands_the_round_back(moment_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendant, "SLICE_S", 60.0)
    monkeypatch.setattr(attendant, "MOMENT_S", moment_s)
    async with local_cluster(2, limits=LIMITS) as ranks, asyncio.timeout(20.0):
        for _ in range(20):
            early = ranks[0].all_reduce(LARGE)
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(early.wait, 0.005)
            assert torch.equal(await ranks[1].all_reduce(LARGE), ones_of(2, LARGE))
            assert torch.equal(await early, ones_of(2, LARGE))


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the thread each time that one looks around."""
    taken, take_turn = list[str](), Attendant._take_turn

    def counted(self: Attendant) -> Mapping[MailboxView, int] | None:
        taken.append(threading.current_thread().name)
        return take_turn(self)

    monkeypatch.setattr(Attendant, "_take_turn", counted)
    return taken


async def test_it_does_not_look_again_and_again_while_it_waits(turns: list[str]) -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        turns.clear()
        early = asyncio.create_task(result_of(ranks[0].all_reduce(LARGE)))
        await asyncio.sleep(0.3)  # not for anything: what it does meanwhile is the question
        assert 1 <= len(turns) < 20
        await ranks[1].all_reduce(LARGE)
        await early


async def test_it_sleeps_while_threads_wait(turns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so even if the others come much later."""
    monkeypatch.setattr(attendant, "MOMENT_S", 1.0)  # also enough for a busy machine to start the threads that wait
    async with local_cluster(2, limits=LIMITS) as ranks:
        await asyncio.to_thread(_until, lambda: len(turns) == 2)  # as they start
        handle = ranks[0].all_reduce(LARGE)
        waiting = asyncio.create_task(asyncio.to_thread(handle.wait))
        await asyncio.sleep(1.5)  # not for anything: what it does meanwhile is the question
        await asyncio.to_thread(ranks[1].all_reduce(LARGE).wait)
        assert torch.equal(await waiting, ones_of(2, LARGE))
        assert len(turns) == 2


@pytest.mark.parametrize("begun", [1, 3])
async def test_it_comes_when_nobody_waits(begun: int, turns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after a moment, and once for all rounds that have begun in that moment, even if somebody waits for one of them."""
    monkeypatch.setattr(attendant, "MOMENT_S", 0.1)
    async with local_cluster(2, limits=LIMITS) as ranks:
        await asyncio.to_thread(_until, lambda: len(turns) == 2)  # as they start
        turns.clear()
        handles = [[rank.all_reduce(LARGER) for rank in ranks] for _ in range(begun)]
        if begun > 1:
            await asyncio.gather(*(asyncio.to_thread(handle.wait) for handle in handles.pop()))
        await asyncio.to_thread(_until, lambda: all(handle.done() for pair in handles for handle in pair))
        assert set(turns) == {"shardnet-attendant-0", "shardnet-attendant-1"}
        for handle in (handle for pair in handles for handle in pair):
            assert torch.equal(await handle, ones_of(2, LARGER))


async def test_who_awaits_calls_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attendant, "MOMENT_S", 60.0)
    async with local_cluster(2, limits=LIMITS) as ranks, asyncio.timeout(20.0):
        for _ in range(20):
            for result in await each_rank(ranks, lambda rank: rank.all_reduce(LARGE)):
                assert torch.equal(result, ones_of(2, LARGE))


async def test_it_leaves_when_its_mesh_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so also during the moment for which it waits for a thread to wait."""
    monkeypatch.setattr(attendant, "MOMENT_S", 60.0)
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(LARGE)
        ranks[0].abort()
        with pytest.raises(ClosedError):
            await handle
    await asyncio.to_thread(_until, lambda: not any("attendant" in thread.name for thread in threading.enumerate()))


async def test_it_keeps_no_result_while_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is of a round that another thread has ended while the attendant slept for another one."""
    monkeypatch.setattr(attendant, "SLICE_S", 60.0)

    def work(rank: Backend) -> torch.Tensor:
        return rank.all_gather(LARGE).wait()

    async with local_cluster(2, limits=LIMITS) as ranks, asyncio.timeout(20.0):
        sleeps = ranks[0].all_reduce(LARGE)
        groups = [rank.subgroup([0, 1]) for rank in ranks]
        results = await asyncio.gather(*(asyncio.to_thread(work, group) for group in groups))
        await each_rank(groups, lambda group: group.barrier())
        traces = [weakref.ref(result) for result in results]
        gc.disable()
        try:
            del results
            await asyncio.to_thread(_until, lambda: all(trace() is None for trace in traces))
        finally:
            gc.enable()
        await ranks[1].all_reduce(LARGE)
        await sleeps


def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        threading.Event().wait(0.01)


async def test_who_is_a_little_late_hears_of_nothing_on_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that share processors are some hundred milliseconds apart in each collective of a training."""
    told, announce = list[str](), Rounds.announce

    def announce_round(rounds: Rounds, begun: Any, peers: Sequence[int], data: bytes | None = None) -> None:
        told.append(begun.name)
        announce(rounds, begun, peers, data)

    monkeypatch.setattr(Rounds, "announce", announce_round)
    async with local_cluster(2, limits=LIMITS) as ranks:
        for tensor in (SMALL, LARGE):
            early = asyncio.create_task(result_of(ranks[0].all_reduce(tensor)))
            await asyncio.sleep(0.1)
            await ranks[1].all_reduce(tensor)
            await early
        assert not told
        early = asyncio.create_task(result_of(ranks[0].all_reduce(LARGE)))
        await asyncio.to_thread(_until, lambda: bool(told))  # but a rank that waits for long says where it is
        await ranks[1].all_reduce(LARGE)
        await early
