"""`Mailbox`: the events on their way to one member."""

import asyncio
from collections import deque

from shardnet.rendezvous.events import Event, Joiners, Waiting


class Mailbox:
    """Events for one member, in order; lives as long as its Join stream.

    Its length is bounded by what can happen: a `Waiting` or a `Joiners` replaces the one before it, there is one `Assigned`, and one `Lost`
    for each other member. So a member that does not read holds up nobody and costs little.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._changed = asyncio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        """Add an event; dropped if the mailbox is closed."""
        if self._closed:
            return
        if self._events and isinstance(event, Waiting | Joiners) and type(event) is type(self._events[-1]):
            self._events.pop()
        self._events.append(event)
        self._changed.set()

    def close(self) -> None:
        """No more events will come; those that are there can still be taken."""
        self._closed = True
        self._changed.set()

    async def take(self) -> Event | None:
        """The next event, or None once the mailbox is closed and empty. For one taker."""
        while not self._events:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._events.popleft()
