"""Waiting for small collectives: how long, in which thread, and what may be done in callbacks."""

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from shardnet.backend import Pending
from shardnet.errors import CollectiveTimeout, StateError
from shardnet.testing import local_cluster
from shardnet.transport.shared_memory import MailboxView, futex
from tests.collectives.letters.rounds import LIMITS, SMALL, interrupt, ones_of, result_of, wait
from tests.promises import within_s

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")


async def test_who_only_asks_whether_it_is_done_is_told_in_time() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL, timeout_s=0.3)
        start = time.monotonic()
        while not handle.done():
            await asyncio.sleep(0.01)
            assert time.monotonic() - start < within_s(1.0)
        assert isinstance(handle.exception(), CollectiveTimeout)


async def test_waiting_gives_up_when_it_is_time() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle = ranks[0].all_reduce(SMALL)
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(handle.wait, 0.5)
        assert 0.5 <= time.monotonic() - start < 0.5 + within_s(0.4)
        await ranks[1].all_reduce(SMALL)
        await handle


async def test_ctrl_c_where_one_waits_leaves_the_work_to_somebody_else() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        handle, sleeps, interrupted, sleep = ranks[0].all_reduce(SMALL), threading.Event(), threading.Event(), MailboxView.wait
        waiting: list[threading.Thread] = []

        def interrupted_sleep(view: MailboxView, *args: Any) -> None:
            if threading.current_thread() in waiting:
                sleeps.set()
                interrupt(interrupted.wait(10.0))
            sleep(view, *args)

        def first_waits() -> bool:
            waiting.append(threading.current_thread())
            return _interrupted(handle)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(MailboxView, "wait", interrupted_sleep)
            first = asyncio.create_task(asyncio.to_thread(first_waits))
            assert await asyncio.to_thread(sleeps.wait, 10.0)
            second = asyncio.create_task(asyncio.to_thread(wait, handle))
            await asyncio.sleep(0.05)
            interrupted.set()
            assert await first
        await ranks[1].all_reduce(SMALL)
        assert torch.equal(await second, ones_of(2))


def _interrupted(handle: Pending[torch.Tensor]) -> bool:
    """A future passes on any error except this one."""
    try:
        handle.wait()
    except KeyboardInterrupt:
        return True
    return False


async def test_a_callback_may_not_wait_and_its_errors_are_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """It runs on the thread that ends a round, and others need that thread."""
    said: list[BaseException] = []
    called = threading.Event()
    async with local_cluster(2, limits=LIMITS) as ranks:
        first, second = ranks[0].all_reduce(SMALL), ranks[0].all_reduce(SMALL)

        def wait_here(_: object) -> None:
            try:
                second.wait()
            except StateError as error:
                said.append(error)
            called.set()
            raise asyncio.CancelledError

        first.add_done_callback(wait_here)
        await ranks[1].all_reduce(SMALL)
        assert await asyncio.to_thread(called.wait, 10.0)
        assert "on one of shardnet's own threads" in str(said[0])
        waiting = asyncio.create_task(result_of(second))
        await asyncio.sleep(0.05)
        await ranks[1].all_reduce(SMALL)
        assert torch.equal(await waiting, ones_of(2))
        assert first.exception() is None


async def test_callbacks_do_not_run_where_somebody_asks_whether_it_is_done() -> None:
    """The asking thread may hold a lock that the callback needs."""
    lock, order = threading.Lock(), []
    async with local_cluster(2, limits=LIMITS) as ranks:
        for _ in range(20):
            ended = threading.Event()
            first, second = ranks[0].all_reduce(SMALL), ranks[0].all_reduce(SMALL)

            def advance(_: object, other: Pending[torch.Tensor] = second, ended: threading.Event = ended) -> None:
                with lock:
                    order.append(other.done())
                    if len(order) % 2 == 0:
                        ended.set()

            first.add_done_callback(advance)
            second.add_done_callback(advance)
            theirs = [ranks[1].all_reduce(SMALL) for _ in range(2)]
            with lock:
                first.done()
                second.done()
            assert await asyncio.to_thread(ended.wait, 10.0)
            for each in (first, second, *theirs):
                assert torch.equal(await each, ones_of(2))
