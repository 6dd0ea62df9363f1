"""`Departure`: a wish that this process leave, to be met at a moment at which nothing is lost.

SIGTERM is what machines that are taken back, containers and schedulers send before they kill. A training that keeps its state can use the
time: `shardnet.elastic` makes the next step safe and then leaves. Who listens to no such wish is cancelled at once.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn


class Departure:
    """Of one program; lives as long as `shardnet.run` runs it."""

    def __init__(self, cancel: Callable[[], object]) -> None:
        """`cancel` ends the program."""
        self.wanted = False
        self._cancel = cancel
        self._heeds: Callable[[], bool] = lambda: False

    @classmethod
    def current(cls) -> "Departure":
        """That of the program that this runs in; where `shardnet.run` does not run it, one that nobody wants."""
        return _current.get() or cls(lambda: None)

    def become_current(self) -> None:
        """For this task and those that it makes."""
        _current.set(self)

    def ask(self) -> bool:
        """Wish it. False, and nothing has changed, if the program is not at a point where somebody will meet it."""
        self.wanted = self.wanted or self._heeds()
        return self.wanted

    @contextmanager
    def heeded(self, while_true: Callable[[], bool]) -> Iterator[None]:
        """Whoever is within looks at `wanted` from time to time and calls `leave`; as long as `while_true` says so."""
        before, self._heeds = self._heeds, while_true
        try:
            yield
        finally:
            self._heeds = before

    async def leave(self) -> NoReturn:
        """End the program, as its cancellation does."""
        self._cancel()
        await asyncio.Event().wait()
        raise AssertionError("unreachable: it is cancelled")


_current: ContextVar[Departure | None] = ContextVar("departure", default=None)
