"""`Departure`: a request that this process leave, to be granted at a moment when nothing is lost.

Reclaimed machines, containers and schedulers send SIGTERM before they kill a process. A training that keeps its state can use the time:
`shardnet.elastic` makes the next step safe and then leaves. A program that does not heed such requests is cancelled at once.
"""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn


class Departure:
    """The departure of one program; lives as long as `shardnet.run` runs it."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        """`cancel` ends the program."""
        self.wanted = False
        self.signal: int | None = None  # its number, if a signal has ended the program
        self._cancel = cancel
        self._heeds: Callable[[], bool] = lambda: False

    @classmethod
    def current(cls) -> "Departure":
        """The departure of the program that calls this; if `shardnet.run` does not run it, one that nobody asks for."""
        return _current.get() or cls(lambda: None)

    def become_current(self) -> None:
        """Become the current one for this task and the tasks that it creates."""
        _current.set(self)

    def ask(self) -> bool:
        """Ask the program to leave. False, and nothing has changed, if the program is not at a point where it heeds this."""
        self.wanted = self.wanted or self._heeds()
        return self.wanted

    @contextmanager
    def heeded(self, while_true: Callable[[], bool]) -> Iterator[None]:
        """The code within this context looks at `wanted` from time to time and calls `leave`, as long as `while_true()`."""
        before, self._heeds = self._heeds, while_true
        try:
            yield
        finally:
            self._heeds = before

    @contextmanager
    def delayed(self, most_s: float, if_wanted_s: float) -> Iterator[None]:
        """The code within this context will soon be over, and a request waits for that; but after `most_s` it ends the program, and after
        `if_wanted_s` if it came before. Enter this on the program's loop."""
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []

        def end() -> None:
            self.signal = signal.SIGTERM  # no other signal asks
            self._cancel()

        def heeds() -> bool:
            timers.append(loop.call_later(most_s, end))
            return True

        if self.wanted:
            timers.append(loop.call_later(if_wanted_s, end))
        with self.heeded(heeds):
            try:
                yield
            finally:
                for timer in timers:
                    timer.cancel()

    async def leave(self) -> NoReturn:
        """End the program, as its cancellation does."""
        self._cancel()
        await asyncio.Event().wait()
        raise AssertionError("unreachable: it is cancelled")


_current: ContextVar[Departure | None] = ContextVar("departure", default=None)
