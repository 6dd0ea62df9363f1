"""`Strangers`: callers that have not been let in yet.

[Note: strangers] Anybody who reaches a port can open connections, say nothing, or begin TLS as often as he likes. None of that needs a
certificate, so it must not take what those who have one need. Descriptors: there are never more than MOST strangers. One more is accepted
only once the oldest has had FAIR_S to say who it is; then that one is cut off. Until then callers wait in the kernel's queue. The
processor: a step of a handshake takes a millisecond, so the loop does one of them in each of its rounds. Between two steps everything
else gets its turn, such as the pings that keep the calls of members alive.
"""

import asyncio
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

MOST = 256
FAIR_S = 0.5  # two round trips, the loop's work for all the others, and some more
_SHARE = 8  # of the files that this process may open, strangers have one of so many at most


class Strangers:
    """Those at the listeners of one port; lives as long as the port. On one loop."""

    def __init__(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = MOST if soft == resource.RLIM_INFINITY else max(1, min(MOST, soft // _SHARE))
        self._since: dict[asyncio.Task[Any], float] = {}  # the oldest first
        self._gone = asyncio.Event()  # one of them is no stranger any more, since this was cleared
        self._step = asyncio.Lock()

    async def make_room(self) -> None:
        """Wait until there may be one more."""
        while len(self._since) >= self._most:
            oldest, since = next(iter(self._since.items()))
            left_s = since + FAIR_S - asyncio.get_running_loop().time()
            if left_s <= 0:
                self.forget(oldest)
                oldest.cancel()
                return
            self._gone.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._gone.wait()

    def add(self, task: asyncio.Task[Any]) -> None:
        """One has come, whom this task serves."""
        self._since[task] = asyncio.get_running_loop().time()
        task.add_done_callback(self.forget)

    def forget(self, task: asyncio.Task[Any] | None) -> None:
        """It has been let in, or is gone."""
        if task is not None and self._since.pop(task, None) is not None:
            self._gone.set()

    @asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Do one step of a handshake within this."""
        async with self._step:
            yield
            await asyncio.sleep(0)
