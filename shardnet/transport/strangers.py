"""`Strangers`: callers that have not been let in yet.

[Note: strangers] Anybody who reaches a port can open connections, say nothing, or begin TLS as often as he likes. None of that needs a
certificate, so it must not take what those who have one need. Descriptors: there are never more than MOST strangers. One more is accepted
only when one has gone, or when one that this process waits for has said nothing for FAIR_S; then that one is cut off. Until then callers
wait in the kernel's queue. A worker that was cut off all the same calls again (outbox.py). The processor: a step of a handshake takes a
millisecond, so the loop does one of them in each of its rounds. Between two steps everything else gets its turn, such as the pings that
keep the calls of members alive. A stranger that waits for its step is not cut off: all ranks of a world call at once.
"""

import asyncio
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from shardnet.transport.throttle import Throttle

log = logging.getLogger(__name__)

MOST = 256
FAIR_S = 1.0  # longer than it takes to send a lost packet again
_SHARE = 4  # strangers may have one of so many files that this process may open


class Strangers:
    """Those at the listeners of one port; lives as long as the port. On one loop."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, soft // _SHARE))
        self._awaited: dict[asyncio.Task[Any], float] = {}  # since when this process waits for each; the oldest first
        self._served = set[asyncio.Task[Any]]()  # that wait for this process
        self._gone = asyncio.Event()  # one of them is no stranger any more, since this was cleared
        self._step = asyncio.Lock()
        self._cut = Throttle(log)

    async def make_room(self) -> None:
        """Wait until there may be one more."""
        while len(self._awaited) + len(self._served) >= self._most:
            oldest, since = next(iter(self._awaited.items()), (None, 0.0))
            left_s = None if oldest is None else since + FAIR_S - asyncio.get_running_loop().time()
            if oldest is not None and left_s is not None and left_s <= 0:
                self._cut.warning(
                    "cut off a caller that had not identified itself for %g s: %d such callers are connected, which is the maximum",
                    FAIR_S,
                    self._most,
                )
                self.forget(oldest)
                oldest.cancel()
                await asyncio.wait({oldest})  # its descriptor is free then
                return
            self._gone.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._gone.wait()

    def add(self, task: asyncio.Task[Any]) -> None:
        """One has come, whom this task serves."""
        self._awaited[task] = asyncio.get_running_loop().time()
        task.add_done_callback(self.forget)

    def forget(self, task: asyncio.Task[Any] | None) -> None:
        """It has been let in, or is gone."""
        if task is not None and (task in self._awaited or task in self._served):
            self._awaited.pop(task, None)
            self._served.discard(task)
            self._gone.set()

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Do one step of a stranger's handshake within this, in its task."""
        task = asyncio.current_task()
        assert task is not None
        if (known := self._awaited.pop(task, None)) is not None:
            self._served.add(task)
        try:
            async with self._step:
                yield
                await asyncio.sleep(0)
        finally:
            if known is not None and task in self._served:
                self._served.discard(task)
                self._awaited[task] = asyncio.get_running_loop().time()
                self._gone.set()  # there may be one to cut off later, where there was none
