"""`Lane`: a queue of what a rank sends one way, to its own node or to the next one, in the order in which others wait for it."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from shardnet.collectives.reduction import Array
from shardnet.wire import Buffer


@dataclass(slots=True)
class Outgoing:
    """A chunk of a block, to one or more peers."""

    peers: tuple[int, ...]
    block: int  # on the wire
    offset: int  # bytes
    data: Array
    frame: Buffer | None = None  # its encoded form, if known
    copy_to: Array | None = None  # where the data belongs on this rank; copied after it is sent, when the others have work to do


@dataclass(slots=True)
class Lane:
    """Four queues, emptied in the order `at_first`, `first`, `then`, `at_last`; `at_first` and `at_last` make each chunk when it is due."""

    unsent: int = 0  # elements that are still to go, queued or not
    at_first: Iterator[Outgoing] = field(default_factory=lambda: iter(()))
    first: deque[Outgoing] = field(default_factory=deque)
    then: deque[Outgoing] = field(default_factory=deque)
    at_last: Iterator[Outgoing] = field(default_factory=lambda: iter(()))
    may_run_ahead: Callable[[], bool] = lambda: True  # whether `at_last` may be sent now; `wake` when that changes
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def queued(self) -> int:
        return len(self.first) + len(self.then)

    def wake(self) -> None:
        """Something was queued, or the lane may run ahead again."""
        self._changed.set()

    async def take(self) -> Outgoing:
        """Take the next chunk; waits until there is one."""
        if (item := next(self.at_first, None)) is not None:
            return item
        while True:
            for queue in (self.first, self.then):
                if queue:
                    return queue.popleft()
            if self.may_run_ahead() and (item := next(self.at_last, None)) is not None:
                return item
            self._changed.clear()
            await self._changed.wait()
