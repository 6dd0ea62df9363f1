"""Handles: awaitable anywhere, any number of times, and never in the collective's way."""

import asyncio
import gc
import re
import threading
import warnings
from collections.abc import Sequence
from typing import Any, TypeVar

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.errors import CollectiveMismatch, StateError
from shardnet.loop import LoopThread
from shardnet.testing import each_rank

Ranks = Sequence[Backend]
T = TypeVar("T")


def start_all(ranks: Ranks, value: float = 1.0) -> list[Pending[torch.Tensor]]:
    return [rank.all_reduce(torch.full((3,), value)) for rank in ranks]


async def test_awaited_twice(pair: Ranks) -> None:
    for handle in start_all(pair):
        assert (await handle) is (await handle)
        assert handle.wait() is (await handle)
        assert handle.exception() is None


async def test_awaited_by_many_at_once(pair: Ranks) -> None:
    first, second = start_all(pair)
    results = await asyncio.gather(*(asyncio.ensure_future(_await(handle)) for handle in [first] * 20 + [second] * 20))
    assert len({id(result) for result in results}) == 2


async def test_an_error_is_raised_every_time(pair: Ranks) -> None:
    handles: list[Pending[Any]] = [pair[0].barrier(), pair[1].all_reduce(torch.ones(1))]
    for handle in handles:
        for _ in range(2):
            with pytest.raises(CollectiveMismatch):
                await handle
            with pytest.raises(CollectiveMismatch):
                handle.wait()
            assert isinstance(handle.exception(), CollectiveMismatch)


async def test_from_other_loops_and_threads(pair: Ranks) -> None:
    """One handle, started here, awaited here, on another loop in another thread, on shardnet's own loop, and waited for."""
    first, second = start_all(pair)
    await second
    elsewhere = asyncio.to_thread(lambda: asyncio.run(_await(first)))
    waited = asyncio.to_thread(first.wait, 10.0)
    on_the_loop = asyncio.wrap_future(LoopThread.shared().run(_await(first)))
    results = await asyncio.gather(elsewhere, waited, on_the_loop)
    assert [result is first.wait() for result in results] == [True] * 3


async def test_ranks_in_threads(four: Ranks) -> None:
    """The plain way: each rank has a thread, which blocks."""

    def work(rank: Backend) -> float:
        return sum(rank.all_reduce(torch.tensor([float(n)])).wait(10.0).item() for n in range(50))

    assert await asyncio.gather(*(asyncio.to_thread(work, rank) for rank in four)) == [4 * sum(range(50))] * 4


async def test_threads_of_one_rank(pair: Ranks) -> None:
    """Several threads of one rank may start collectives, as long as all ranks start them in the same order."""
    turn = threading.Lock()

    def both(number: int) -> list[float]:
        with turn:
            handles = start_all(pair, float(number))
        return [handle.wait(10.0)[0].item() for handle in handles]

    sums = await asyncio.gather(*(asyncio.to_thread(both, number) for number in range(30)))
    assert sums == [[2.0 * number] * 2 for number in range(30)]


async def test_a_dropped_handle_warns_and_its_collective_ends(pair: Ranks) -> None:
    dropped, kept = start_all(pair)
    handles = [dropped]
    del dropped
    with pytest.warns(ResourceWarning, match="all_reduce was never awaited"):
        handles.clear()
    assert (await kept).tolist() == [2.0] * 3
    await each_rank(pair, lambda rank: rank.barrier())


async def test_the_error_of_a_dropped_handle_is_in_the_log(pair: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    dropped, kept = pair[0].all_reduce(torch.zeros(2)), pair[1].all_reduce(torch.zeros(3))
    for ended in (kept, asyncio.wrap_future(dropped._future)):
        with pytest.raises(CollectiveMismatch):
            await ended
    with pytest.warns(ResourceWarning, match="all_reduce was never awaited"):
        del dropped
    (record,) = caplog.records
    assert re.match(r"all_reduce has failed, and was never awaited: \[rank 0/2 .*rank \d is in all_reduce\(float32", record.getMessage())
    await each_rank(pair, lambda rank: rank.barrier())


async def test_what_was_asked_for_once_does_not_warn(pair: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for handle in start_all(pair):
            handle.wait()
        for handle in start_all(pair):
            handle.exception()
        await asyncio.gather(*(_await(handle) for handle in start_all(pair)))
        del handle
        gc.collect()


async def test_cancelling_an_await_does_not_cancel_the_collective(pair: Ranks) -> None:
    handle = pair[0].all_reduce(torch.ones(100))
    waiting = asyncio.ensure_future(_await(handle))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    other = pair[1].all_reduce(torch.ones(100))
    assert (await handle).tolist() == (await other).tolist() == [2.0] * 100


async def test_the_loop_of_a_cancelled_await_may_close(pair: Ranks) -> None:
    """The waiting task and its loop are gone when the result comes."""
    handle = pair[0].all_reduce(torch.ones(1))

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await handle

    await asyncio.to_thread(lambda: asyncio.run(give_up()))
    await pair[1].all_reduce(torch.ones(1))
    assert (await handle).item() == 2


async def test_waiting_a_limited_time(pair: Ranks) -> None:
    handle = pair[0].all_reduce(torch.ones(1))
    with pytest.raises(TimeoutError):
        handle.wait(0.01)
    assert not handle.done()
    other = pair[1].all_reduce(torch.ones(1))
    assert handle.wait(10.0).item() == other.wait(10.0).item() == 2
    assert handle.done()


async def test_blocking_the_loop_thread_is_refused(pair: Ranks) -> None:
    """It would wait for itself, for ever."""
    handle = pair[0].all_reduce(torch.ones(1))

    async def block() -> None:
        with pytest.raises(StateError, match="all_reduce cannot be waited for on one of shardnet's own threads"):
            handle.wait()
        with pytest.raises(StateError, match="all_reduce cannot be waited for on one of shardnet's own threads"):
            handle.exception()

    await LoopThread.shared().run_here(block())
    await pair[1].all_reduce(torch.ones(1))
    await LoopThread.shared().run_here(_wait_for_what_is_done(handle))


async def _wait_for_what_is_done(handle: Pending[torch.Tensor]) -> None:
    await handle
    assert handle.wait().item() == 2


async def test_mapping(pair: Ranks) -> None:
    doubled = [handle.map(lambda result: (result * 2).tolist()) for handle in start_all(pair)]
    assert [await each for each in doubled] == [[4.0] * 3] * 2
    assert doubled[0].op_name == "all_reduce"
    for failing in [handle.map(lambda result: result[7]) for handle in start_all(pair)]:
        with pytest.raises(IndexError):
            await failing


async def test_callbacks_come_once_done(pair: Ranks) -> None:
    called = asyncio.Queue[Pending[torch.Tensor]]()
    loop = asyncio.get_running_loop()
    handles = start_all(pair)

    def tell(done: Pending[torch.Tensor]) -> None:
        loop.call_soon_threadsafe(called.put_nowait, done)

    for handle in handles:
        handle.add_done_callback(tell)
    assert {id(await called.get()), id(await called.get())} == {id(handle) for handle in handles}
    assert all(handle.done() for handle in handles)
    for handle in handles:
        await handle


async def test_names(pair: Ranks) -> None:
    async def work(rank: Backend) -> list[str]:
        x, other = torch.ones(2), 1 - rank.rank
        handles: list[Pending[Any]] = [
            *(rank.all_reduce(x), rank.broadcast(x, 0), rank.all_gather(x), rank.reduce_scatter(x), rank.all_to_all(x)),
            *(rank.send(x, other), rank.recv(torch.ones(2), other), rank.barrier(), rank.all_gather(torch.ones(0))),
        ]
        for handle in handles:
            await handle
        return [handle.op_name for handle in handles]

    names = ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "send", "recv", "barrier", "all_gather"]
    assert await each_rank(pair, work) == [names] * 2
    handle = pair[0].barrier()
    assert repr(handle) == "<Pending barrier under way>"
    await asyncio.gather(_await(handle), _await(pair[1].barrier()))
    assert repr(handle) == "<Pending barrier done>"


async def _await(handle: Pending[T]) -> T:
    return await handle
