"""Work that gives way to everything else."""

import asyncio
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_NICE = 19  # what others leave


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
