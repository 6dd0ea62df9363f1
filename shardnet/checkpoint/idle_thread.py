"""Work that gives way to everything else."""

import asyncio
import concurrent.futures
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_NICE = 19  # what others leave
_SHARE = 0.02  # of a processor; a training that uses all of it is slower by this share


class Leisure:
    """How much of the processor a thread beside a training takes: a small share, with rests in between, until somebody waits for the
    thread.

    A low priority alone is not enough: the processor time that a save needs is then taken from one step, which other ranks wait for.
    Measured: such a step takes 1.08 times as long, against 1.03 for the steps over which this spreads the work
    (benchmarks/README.md).
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._rested_s = 0.0  # the thread's own time at the end of its last rest

    def rest(self) -> None:
        """The thread itself calls this after each piece of work; a piece of a few milliseconds is hardly felt."""
        worked_s = time.thread_time() - self._rested_s
        self._is_over.wait(worked_s * (1 / _SHARE - 1))
        self._rested_s = time.thread_time()

    def end(self) -> None:
        """No rests from now on; may be called from any thread."""
        self._is_over.set()


async def in_idle_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run the function in a thread that gets the processor time that other threads leave. Cancelling this does not end the thread, and
    the thread does not keep the process from ending.

    Writing a file takes as much processor time as copying it; a training that keeps all processors busy would be slower by that while
    the file is written. The thread holds Python's lock for moments only.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # so that nobody can cancel it

    def run() -> None:
        try:
            _give_way()
            done.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is for whoever waits
            done.set_exception(error)

    threading.Thread(target=run, name="shardnet-checkpoint", daemon=True).start()
    return await asyncio.wrap_future(done)


def _give_way() -> None:
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
