"""Handles that the tests finish: who waits for them, also on the streams of a GPU. Those of collectives: tests/contract/test_handles.py."""

import asyncio
import concurrent.futures

import pytest

from shardnet.backend import Pending
from shardnet.errors import UsageError


class Arrival:
    def __init__(self) -> None:
        self.joined = 0

    def __call__(self) -> None:
        self.joined += 1


async def test_each_way_to_the_result_has_the_stream_wait() -> None:
    arrival, future = Arrival(), concurrent.futures.Future[int]()
    pending = Pending(future, "all_reduce", arrival)
    mapped = pending.map(lambda value: value + 1)
    seen: list[int] = []
    pending.add_done_callback(lambda done: seen.append(arrival.joined))
    future.set_result(3)
    assert seen == [0]  # on the thread that has finished it
    assert pending.wait() == 3
    assert pending.exception() is None
    assert mapped.wait() == 4
    assert arrival.joined == 3
    assert await pending == 3
    assert await mapped == 4
    assert arrival.joined == 5


async def test_an_await_that_began_before_the_end() -> None:
    arrival, future = Arrival(), concurrent.futures.Future[int]()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        thread.submit(future.set_result, 3)
        assert await Pending(future, "all_reduce", arrival) == 3
    assert arrival.joined == 1


def test_an_error_is_nothing_to_wait_for() -> None:
    arrival, future = Arrival(), concurrent.futures.Future[int]()
    pending = Pending(future, "all_reduce", arrival)
    future.set_exception(UsageError("no"))
    with pytest.raises(UsageError):
        pending.wait()
    assert isinstance(pending.exception(), UsageError)
    assert arrival.joined == 0


async def test_awaits_that_are_given_up_leave_nothing_behind() -> None:
    """As of a program that looks at other things now and then while it waits for a long receive."""
    future = concurrent.futures.Future[int]()
    pending = Pending(future, "recv")

    async def wait() -> int:
        return await pending

    patient = asyncio.ensure_future(wait())
    for _ in range(10):
        given_up = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({given_up})
        assert given_up.cancelled()
    assert len(future._done_callbacks) == 1  # type: ignore[attr-defined]
    assert pending._waiters is not None
    assert len(pending._waiters) == 1
    future.set_result(3)
    assert await patient == await pending == 3
    assert not pending._waiters


@pytest.mark.parametrize("awaits", [1, 2, 5])
async def test_an_end_while_awaits_begin_wakes_each(awaits: int) -> None:
    """On another thread, at any moment."""

    async def wait(pending: Pending[int]) -> int:
        return await pending

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        for number in range(200):
            pending = Pending(concurrent.futures.Future[int](), "recv")
            thread.submit(pending._future.set_result, number)
            assert await asyncio.gather(*(wait(pending) for _ in range(awaits))) == [number] * awaits


async def test_reading_a_result_as_something_else() -> None:
    """The handle waits for the collective itself, not for another handle's end, so the waiting thread may do the collective's work."""
    arrival, future = Arrival(), concurrent.futures.Future[int]()
    made: list[int] = []

    def next_one(value: int) -> int:
        made.append(value)
        return value + 1

    pending = Pending(future, "all_gather", arrival).read_as(next_one)
    text, mapped = pending.read_as(str), pending.map(float)
    assert pending._future is text._future is future
    assert not pending.done()
    future.set_result(3)
    assert made == [3]  # for the one that was mapped
    assert pending.exception() is None
    assert made == [3]
    assert pending.wait() == 4
    assert await text == "4"
    assert mapped.wait() == 4.0
    assert made == [3, 3, 3]
    assert arrival.joined == 4


def test_an_error_is_read_as_nothing_else() -> None:
    future = concurrent.futures.Future[int]()
    pending = Pending(future, "all_gather").read_as(str)
    future.set_exception(UsageError("no"))
    with pytest.raises(UsageError):
        pending.wait()
