"""The one event loop of a process, on a thread of its own.

[Note: one loop thread] Collectives, heartbeats and gRPC servers of all ranks in this process run here. The user's
coroutines and autograd hooks hand work over and get a handle back, so `loss.backward()` in the user's own loop cannot
stall a heartbeat and a hook that waits cannot deadlock. grpc.aio wants one loop per process: with more they share a
poller and log errors.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from shardnet.errors import InheritedError

T = TypeVar("T")

THREAD_NAME = "shardnet-loop"


_helping = threading.local()


def help_out() -> None:
    """Declare that this thread serves others: like the loop thread, it must never be blocked."""
    _helping.out = True


class LoopThread:
    """The process's event loop thread; started at first use, ends with the process."""

    _shared: "LoopThread | None" = None
    _shared_lock = threading.Lock()

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
        self._thread.start()

    @classmethod
    def shared(cls) -> "LoopThread":
        """The loop thread of this process (a forked child gets its own: threads do not survive a fork)."""
        with cls._shared_lock:
            if cls._shared is None or cls._shared._pid != os.getpid():
                cls._shared = cls()
            return cls._shared

    @classmethod
    def _renew_lock(cls) -> None:
        """In a forked child: a thread that held the lock is not there to release it, and every wait for a collective takes it."""
        cls._shared_lock = threading.Lock()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def may_block(self) -> bool:
        """Whether the current thread may wait for a collective: any thread except the loop thread and those that help out."""
        return not (self.is_current() or getattr(_helping, "out", False))

    def call(self, function: Callable[..., object], *args: object) -> None:
        """Run a short function on the loop thread, soon, after everything that was handed over before."""
        self.loop.call_soon_threadsafe(function, *args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Start a coroutine on the loop thread. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    async def run_here(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop thread and await it from any loop.

        Cancelling this cancels the coroutine and waits for its end, so that the coroutine has closed what it opened, and the caller may
        close the rest. The coroutine may nevertheless have succeeded: a caller that acquires something by it must give that back in either
        case. Cancelling a second time does not wait.
        """
        if self._pid != os.getpid():
            coroutine.close()
            raise InheritedError
        if self.is_current():
            return await coroutine
        task: asyncio.Task[T]
        ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        ended.set_running_or_notify_cancel()  # nobody else may end it

        def end(done: "asyncio.Task[T]") -> None:
            if not done.cancelled():
                done.exception()  # marks it as seen: the caller looks at it, or no longer waits
            ended.set_result(None)

        def start() -> None:
            nonlocal task
            task = self.loop.create_task(coroutine)
            task.add_done_callback(end)

        self.call(start)
        waiting = asyncio.wrap_future(ended)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.call(lambda: self.loop.call_soon(task.cancel))  # after its first step: a coroutine that closes something must begin
            try:
                await asyncio.wait({waiting})
            finally:
                waiting.cancel()
            raise
        return task.result()


os.register_at_fork(after_in_child=LoopThread._renew_lock)
