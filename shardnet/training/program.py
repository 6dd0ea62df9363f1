"""Running an async training program so that signals end it cleanly.

[Note: signals of children] An event loop's signal handler is written in C and writes the number of the signal into a socket that the loop
reads. A forked child inherits both, so a signal sent to the child, by `Process.terminate()` or by a Pool that ends its workers, would end
the parent. Therefore a child first gets the handlers that were there before the program began, and signals are blocked until then.
"""

import asyncio
import inspect
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

import uvloop

from shardnet.errors import UsageError
from shardnet.training.departure import Departure
from shardnet.training.leaving import Interrupted, leave_child
from shardnet.training.tracebacks import shorten

T = TypeVar("T")
log = logging.getLogger(__name__)
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_before: dict[signal.Signals, Any] = {}  # their handlers before the running program began, if one runs
_ours: dict[signal.Signals, Any] = {}  # their handlers while it runs, unless it has set others
_forking = threading.local()  # `mask`: the signals that were blocked before a fork


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main()` to its end on a uvloop, and return what it returns. The first SIGINT or SIGTERM cancels it, so that its `finally` blocks
    run and the process exits with 130 or 143, without delay ([Note: leaving at once] in leaving.py); a second one kills the process
    at once. (asyncio.run turns the second one into an exception, raised anywhere, perhaps inside the loop: then the loop never does what it
    was about to do, and a program may hang.) While `shardnet.elastic.run` trains, SIGTERM takes effect when the next step or two are done
    and safe: departure.py. In a thread other than the main one, signals are left alone.

    What `main` raises is raised, with a traceback reduced to the program ([Note: short tracebacks] in tracebacks.py); UsageError for a
    coroutine in place of the function, and if an event loop runs already in this thread.
    """
    received: list[int] = []
    _check(main)
    hears = threading.current_thread() is threading.main_thread()
    pid = os.getpid()

    async def guarded() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        departure = Departure(task.cancel)
        departure.become_current()

        def stop(number: int) -> None:
            received.append(number)
            if number == signal.SIGTERM and departure.ask():
                _kill_by(loop, signal.SIGTERM)
                log.warning("SIGTERM: this worker leaves as soon as its state is safe; a second SIGTERM, or Ctrl-C, ends it sooner")
                return
            _kill_by(loop, signal.SIGINT, signal.SIGTERM)
            departure.signal = number
            task.cancel()

        for number in _SIGNALS if hears else ():
            loop.add_signal_handler(number, stop, number)
            _ours[number] = signal.getsignal(number)
        try:
            return await main()
        finally:
            if os.getpid() != pid:
                leave_child()

    if hears:
        _before.update({number: signal.getsignal(number) for number in _SIGNALS})
    try:
        return uvloop.run(guarded())
    except asyncio.CancelledError:
        if not received:
            raise
        raise Interrupted(received[-1]) from None
    except (Exception, BaseExceptionGroup) as error:
        log.debug("the program has failed", exc_info=True)
        shorten(error)
        raise
    finally:
        if hears:
            _give_back(() if received else _SIGNALS)  # after a first signal the next one still kills


def _check(main: object) -> None:
    if inspect.iscoroutine(main):
        main.close()
        raise UsageError("shardnet.run needs the function, not a coroutine: write shardnet.run(main), not shardnet.run(main())")
    if asyncio._get_running_loop() is not None:
        raise UsageError("an event loop runs in this thread already, as in a notebook: write `await main()` in place of shardnet.run(main)")


def _hold_signals() -> None:
    """Before a fork. See [Note: signals of children]."""
    if _before:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _hear_signals() -> None:
    """After a fork, in the parent."""
    if (mask := _forking.__dict__.pop("mask", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _give_back_signals() -> None:
    """After a fork, in the child."""
    if _before:
        signal.set_wakeup_fd(-1)
        _give_back(_SIGNALS)
    _hear_signals()


def _give_back(numbers: Iterable[signal.Signals]) -> None:
    """Restore the handlers from before the program began, unless the program has set others."""
    for number in numbers:
        if signal.getsignal(number) == _ours.get(number):
            before = _before.get(number)
            signal.signal(number, signal.SIG_DFL if before is None else before)
    _before.clear()


os.register_at_fork(before=_hold_signals, after_in_parent=_hear_signals, after_in_child=_give_back_signals)


def _kill_by(loop: asyncio.AbstractEventLoop, *numbers: signal.Signals) -> None:
    """Let the next one of these signals kill the process."""
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
