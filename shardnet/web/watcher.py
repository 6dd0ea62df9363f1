"""`Watcher`: looks at a cluster repeatedly."""

import asyncio
import logging
import time
from types import TracebackType
from typing import Self

from shardnet.address import Address
from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable, HandshakeError, ProtocolError
from shardnet.observation.follower import Follower
from shardnet.observation.observer import Observer
from shardnet.observation.views import ClusterView
from shardnet.web.story import Story

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
ANSWER_S = 2.0  # a process that has not answered by then is shown as unreachable


class Watcher:
    """Adds everything that it finds to a story; an async context manager that looks as long as it is entered."""

    def __init__(self, address: str, story: Story, security: Security, interval_s: float = INTERVAL_S) -> None:
        """address   where a rendezvous listens, as given to it
        security  of this process, which asks: a certificate in any role may ask for health and statistics
        """
        self._security = security
        self._address = reachable(address)
        self._story = story
        self._interval_s = interval_s
        self._watching: asyncio.Task[None] | None = None  # owned: awaited when it is left

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch(), name=f"watching {self._address}")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})

    async def _watch(self) -> None:
        async with Follower(self._security, self._interval_s, ANSWER_S) as follower:
            observer = Observer(self._security, ANSWER_S, follower.ask)
            while True:
                begin_s = time.monotonic()
                try:
                    await self._look_on(observer, follower, begin_s)
                except Exception:  # the rendezvous goes on, and so does the page, with the data that it has
                    log.exception("the page could not be updated from the rendezvous at %s", self._address)
                await asyncio.sleep(max(0.0, begin_s + self._interval_s - time.monotonic()))

    async def _look_on(self, observer: Observer, follower: Follower, begin_s: float) -> None:
        view = await self._look(observer)
        if view is not None:
            self._story.add(time.time(), begin_s, view)
            await follower.keep({self._address, *(worker.address for job in view.jobs for worker in job.workers)})

    async def _look(self, observer: Observer) -> ClusterView | None:
        """Look once; returns None before any process has answered."""
        try:
            return await observer.look(self._address)
        except (EndpointUnavailable, HandshakeError, ProtocolError):
            return None if self._story.view is None else await observer.look_again(self._story.view)


def reachable(address: str) -> str:
    """The address at which this machine can call a process that listens at `address`."""
    parsed = Address.parse(address)
    if not parsed.is_unspecified:
        return address
    return str(Address("::1" if ":" in parsed.host else "127.0.0.1", parsed.port))
