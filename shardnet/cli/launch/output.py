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
from shardnet.cli.launch.tracebacks import Tracebacks

TAIL_LINES = 20
REDRAW_S = 1.0  # one of the lines that overwrite each other is shown in this time; a worker's own progress bar draws many more


class Output:
    """Prefixes every line and remembers the last ones; lives as long as the stream.

    prefix      called for every batch of lines, because a worker's rank is known only after it has joined
    tracebacks  finds the tracebacks in this stream; None: they are not looked for
    """

    def __init__(self, console: Console, stream: TextIO, prefix: Callable[[TextIO], str], tracebacks: Tracebacks | None = None) -> None:
        self._console = console
        self._stream = stream
        self._prefix = prefix
        self._tracebacks = tracebacks
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
            await self._write([*self._shown(self._splitter.finish()), *self._released()])

    async def _read(self, pipe: Pipe) -> bytes:
        while self._tracebacks is not None and (held_s := self._tracebacks.held_s) is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(held_s):
                    return await pipe.read()
            await self._write(self._released())
        return await pipe.read()

    def _released(self) -> list[str]:
        return [] if self._tracebacks is None else self._tracebacks.release()

    async def _write(self, lines: Iterable[str]) -> None:
        if lines := list(lines):
            await self._console.write(self._stream, lines, self._prefix(self._stream))

    def _shown(self, lines: Iterable[Line]) -> Iterator[str]:
        for line in lines:
            if line.overwritten:
                if time.monotonic() < self._redraw_at_s:
                    continue
                self._redraw_at_s = time.monotonic() + REDRAW_S
                yield from [*self._released(), line.text]
            elif self._tracebacks is None:
                self._tail.append(line.text)
                yield line.text
            else:
                self._tail.append(text := self._tracebacks.bare(line.text))
                yield from self._tracebacks.feed(text)
