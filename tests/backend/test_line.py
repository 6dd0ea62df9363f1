"""A line: jobs run in the order of their places, in whatever order they come."""

import asyncio
import threading

import pytest

from shardnet.backend.line import Line
from shardnet.loop import LoopThread


async def test_jobs_begin_in_the_order_of_their_places() -> None:
    """Collectives are cleared out of order, and one is given up."""
    ran: list[int] = []
    ended = threading.Event()
    line = Line("shardnet-torch-test", ended.set)

    async def work() -> None:
        places = [line.place() for _ in range(5)]
        jobs = {number: asyncio.ensure_future(places[number].run(lambda number=number: ran.append(number))) for number in (4, 2, 1)}  # type: ignore[misc]
        await asyncio.sleep(0)  # each job has come, and waits for number 0
        assert not any(place.begun for place in places)
        places[3].give_up()
        await places[0].run(lambda: ran.append(0))
        await asyncio.gather(*jobs.values())

    await LoopThread.shared().run_here(work())
    assert ran == [0, 1, 2, 4]
    await _close(line)
    assert ended.is_set()


async def test_who_gives_up_late_holds_up_nobody() -> None:
    """A job that has begun goes on, and its error goes to every caller that still waits."""
    line = Line("shardnet-torch-test", lambda: None)
    hold, begun = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        hold.wait(10.0)
        raise ValueError("from a job")

    async def work() -> None:
        first, second = line.place(), line.place()
        failing = asyncio.ensure_future(first.run(fail))
        following = asyncio.ensure_future(second.run(lambda: None))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        first.give_up()
        hold.set()
        with pytest.raises(ValueError, match="from a job"):
            await failing
        await following

    await LoopThread.shared().run_here(work())
    await _close(line)


async def test_what_waits_when_it_is_closed_never_begins() -> None:
    ran: list[int] = []
    line = Line("shardnet-torch-test", lambda: None)

    async def work() -> None:
        first, second = line.place(), line.place()
        waiting = asyncio.ensure_future(second.run(lambda: ran.append(1)))
        await first.run(lambda: ran.append(0))
        await waiting
        line.close()
        third = asyncio.ensure_future(line.place().run(lambda: ran.append(2)))
        assert line.ended is not None
        await line.ended
        third.cancel()

    await LoopThread.shared().run_here(work())
    assert ran == [0, 1]


async def _close(line: Line) -> None:
    async def close() -> None:
        line.close()
        assert line.ended is not None
        await line.ended

    await LoopThread.shared().run_here(close())
