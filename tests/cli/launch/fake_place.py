"""`FakePlace`: workers without processes, which end when and how a test says."""

import asyncio
import itertools

from shardnet.cli.launch.failure import Exit

LONG_S = 3600.0
_CLOCK = itertools.count(LONG_S + 1)  # so that every exit is later than those before


def ended(label: str, code: int, *, lived_s: float = LONG_S, was_ended: bool = False, tail: tuple[str, ...] = ()) -> Exit:
    now_s = next(_CLOCK)
    return Exit(label, code, now_s - lived_s, now_s, was_ended, tail)


class FakePlace:
    """Its workers end when `end` says so, or at once by any signal."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.started = 0
        self.signals: list[int] = []
        self._running = False
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._news = asyncio.Condition()

    async def run(self) -> Exit:
        async with self._news:
            self.started += 1
            self._running = True
            self._news.notify_all()
        end = await self._exits.get()
        self._running = False
        return end

    async def until_started(self, times: int) -> None:
        async with self._news:
            await self._news.wait_for(lambda: self.started == times)

    def end(self, code: int, *, lived_s: float = LONG_S, tail: tuple[str, ...] = ()) -> None:
        self._exits.put_nowait(ended(self.label, code, lived_s=lived_s, tail=tail))

    def signal(self, number: int) -> None:
        if self._running:
            self.signals.append(number)
            self._exits.put_nowait(ended(self.label, -number, was_ended=True))

    def kill(self) -> None:
        self.signal(9)
