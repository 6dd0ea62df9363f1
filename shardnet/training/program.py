"""Running an async training program so that signals end it cleanly."""

import asyncio
import inspect
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from shardnet.errors import UsageError
from shardnet.training.departure import Departure
from shardnet.training.leaving import Interrupted
from shardnet.training.tracebacks import shorten

log = logging.getLogger(__name__)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `main()` to its end on a uvloop. The first SIGINT or SIGTERM cancels it, so that its `finally` blocks run and the process exits
    with 130 or 143, without delay ([Note: leaving at once] in leaving.py); a second one kills the process at once. (asyncio.run makes an
    exception of the second one, at any place, which may be inside the loop: then what that was about to do is never done, and a program
    may hang.) While `shardnet.elastic.run` trains, SIGTERM is met when the next step or two are done and safe: departure.py.

    What `main` raises is raised, with a traceback that is about the program ([Note: short tracebacks] in tracebacks.py); UsageError for a
    coroutine in place of the function.
    """
    received: list[int] = []
    _check(main)

    async def guarded() -> None:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        departure = Departure(task.cancel)
        departure.become_current()

        def stop(number: int) -> None:
            received.append(number)
            if number == signal.SIGTERM and departure.ask():
                _kill_by(loop, signal.SIGTERM)
                log.warning("SIGTERM: this worker leaves as soon as its training is safe; once more, or Ctrl-C, ends it sooner")
                return
            _kill_by(loop, signal.SIGINT, signal.SIGTERM)
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        await main()

    try:
        uvloop.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[-1]) from None
    except (Exception, BaseExceptionGroup) as error:
        log.debug("the program has failed", exc_info=True)
        shorten(error)
        raise


def _check(main: object) -> None:
    if inspect.iscoroutine(main):
        main.close()
        raise UsageError("shardnet.run calls the function itself: shardnet.run(main), and not shardnet.run(main()), as asyncio.run has it")


def _kill_by(loop: asyncio.AbstractEventLoop, *numbers: signal.Signals) -> None:
    """The next signal of these kills the process."""
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
