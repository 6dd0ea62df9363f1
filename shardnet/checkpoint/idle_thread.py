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
_SHARE = 0.02  # of a processor; where a training takes all of it, that is by how much it is slower


class Leisure:
    """What a thread beside a training takes of the processor: a small share, with rests between, until somebody waits for it.

    A priority alone does not do: the processor's time that a save needs is then taken from one step, which others wait for. Measured:
    1.08 times as long, against 1.03 for the steps over which this spreads it (benchmarks/README.md).
    """

    def __init__(self) -> None:
        self._is_over = threading.Event()
        self._rested_s = 0.0  # the thread's own time at the end of its last rest

    def rest(self) -> None:
        """For the thread itself, after each piece of work; one of a few milliseconds is hardly felt."""
        worked_s = time.thread_time() - self._rested_s
        self._is_over.wait(worked_s * (1 / _SHARE - 1))
        self._rested_s = time.thread_time()

    def end(self) -> None:
        """No rests from now on; from any thread."""
        self._is_over.set()


async def in_idle_thread(function: Callable[..., T], *arguments: object) -> T:
    """Run it in a thread that gets what other threads leave of the processor. Cancelling this does not end it, and neither does it keep
    the process from ending.

    Writing a file takes as much of a processor as copying it does; a training that keeps all of them busy would be slower by that for as
    long as it takes. It holds Python's lock for moments only.
    """
    done: concurrent.futures.Future[T] = concurrent.futures.Future()
    done.set_running_or_notify_cancel()  # nobody else may end it

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
