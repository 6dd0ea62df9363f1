"""`Output`: one stream of one worker on its way to the console."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TextIO

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.lines import Line, LineSplitter
from shardnet.cli.launch.pipe import Pipe
from shardnet.cli.launch.tracebacks import HELD_S, Tracebacks

TAIL_LINES = 20
REDRAW_S = 1.0  # of lines that overwrite each other, one in this time is shown; a worker's own progress bar draws many more


class Output:
    """Prefixes every line and remembers the last ones; lives as long as the stream.

    label   what the worker is called
    prefix  of its lines; both are asked for again and again, because a worker's rank is known only after it has joined
    """

    def __init__(self, console: Console, stream: TextIO, label: Callable[[], str], prefix: Callable[[TextIO], str]) -> None:
        self._console = console
        self._stream = stream
        self._prefix = prefix
        self._tracebacks = Tracebacks(console.told, label)
        self._splitter = LineSplitter()
        self._redraw_at_s = 0.0
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def tail(self) -> tuple[str, ...]:
        """The last lines, without prefix."""
        return tuple(self._tail)

    async def pump(self, pipe: Pipe) -> None:
        """Copy until every writer has closed; a line without an end is written when the stream ends or this is cancelled."""
        try:
            while data := await self._read(pipe):
                await self._write(self._shown(self._splitter.feed(data)))
        finally:
            await self._write([*self._shown(self._splitter.finish()), *self._tracebacks.release()])

    async def _read(self, pipe: Pipe) -> bytes:
        while self._tracebacks.is_within:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HELD_S):
                    return await pipe.read()
            await self._write(self._tracebacks.release())
        return await pipe.read()

    async def _write(self, lines: Iterable[str]) -> None:
        prefix = self._prefix(self._stream)
        text = "".join(f"{prefix}{line}\n" for line in lines)
        if text:
            await self._console.write(self._stream, text)

    def _shown(self, lines: Iterable[Line]) -> Iterator[str]:
        for line in lines:
            if line.overwritten:
                if time.monotonic() < self._redraw_at_s:
                    continue
                self._redraw_at_s = time.monotonic() + REDRAW_S
                yield line.text
            else:
                self._tail.append(line.text)
                yield from self._tracebacks.feed(line.text)
