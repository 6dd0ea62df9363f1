"""Work that is handed to the loop thread from another loop: its result, its error, and cancelling it."""

import asyncio
import subprocess
import sys
import threading

import pytest

from shardnet.loop import THREAD_NAME, LoopThread
from tests.forked_child import in_a_child


async def where() -> str:
    return threading.current_thread().name


async def test_it_runs_there_and_its_result_comes_back() -> None:
    assert await LoopThread.shared().run_here(where()) == THREAD_NAME


async def test_its_error_comes_back() -> None:
    async def fail() -> None:
        raise ValueError("this one")

    with pytest.raises(ValueError, match="this one"):
        await LoopThread.shared().run_here(fail())


async def test_what_is_cancelled_at_once_has_begun() -> None:
    """Otherwise what it should close would stay open."""
    closed = threading.Event()

    async def close() -> None:
        try:
            await asyncio.sleep(10.0)
        finally:
            closed.set()

    for _ in range(20):
        closed.clear()
        task = asyncio.create_task(LoopThread.shared().run_here(close()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert closed.is_set()


async def test_cancelling_waits_until_it_has_cleaned_up() -> None:
    begun, cleaned = threading.Event(), threading.Event()

    async def hold() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)  # as closing something may take
            cleaned.set()

    task = asyncio.create_task(LoopThread.shared().run_here(hold()))
    await asyncio.to_thread(begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned.is_set()


async def test_cancelling_before_it_has_begun() -> None:
    """On a loop thread that is busy."""
    shared, free = LoopThread.shared(), threading.Event()
    shared.call(free.wait)
    task = asyncio.create_task(shared.run_here(where()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelling_twice_does_not_wait() -> None:
    begun, free = threading.Event(), asyncio.Event()

    async def hold() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await free.wait()

    task = asyncio.create_task(LoopThread.shared().run_here(hold()))
    await asyncio.to_thread(begun.wait)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    LoopThread.shared().call(free.set)


FORKS = """
import asyncio, os
from shardnet.errors import InheritedError
from shardnet.loop import LoopThread

loop = LoopThread.shared()
child = os.fork()
if child == 0:
    try:
        asyncio.run(loop.run_here(asyncio.sleep(0)))
    except InheritedError:
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_does_not_wait_for_the_thread_of_its_parent() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=30, check=False)
    assert (ended.stdout, ended.returncode) == ("7\n", 0), ended.stderr


def test_a_child_that_was_forked_while_another_thread_asked_for_the_loop_thread() -> None:
    """A wait for a collective asks for it; that thread does not exist in the child, and would hold the lock for ever."""
    shared, asked, free = LoopThread.shared(), threading.Event(), threading.Event()

    def hold() -> None:
        with LoopThread._shared_lock:
            asked.set()
            free.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    asked.wait()
    try:
        assert in_a_child(lambda: LoopThread.shared().run(where()).result()) == THREAD_NAME
    finally:
        free.set()
        holder.join()
    assert LoopThread.shared() is shared
