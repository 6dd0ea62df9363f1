"""Running an async training program so that signals end it cleanly."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from shardnet.training.leaving import Interrupted


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main()` to its end on a uvloop. The first SIGINT or SIGTERM cancels it, so that its `finally` blocks run and the process exits
    with 130 or 143, without delay ([Note: leaving at once] in leaving.py); a second one kills the process at once. (asyncio.run makes an
    exception of the second one, at any place, which may be inside the loop: then what that was about to do is never done, and a program
    may hang.)"""
    received: list[int] = []

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            received.append(number)
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_DFL)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await main()

    try:
        uvloop.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[0]) from None
