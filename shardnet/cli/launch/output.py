"""`Output`: one stream of one worker on its way to the console."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.lines import Line, LineSplitter
from shardnet.cli.launch.pipe import Pipe

TAIL_LINES = 20
REDRAW_S = 1.0  # of lines that overwrite each other, one in this time is shown; a worker's own progress bar draws many more


class Output:
    """Prefixes every line and remembers the last ones; lives as long as the stream.

    prefix  asked for every batch of lines, because a worker's rank is known only after it has joined
    """

    def __init__(self, console: Console, stream: TextIO, prefix: Callable[[TextIO], str]) -> None:
        self._console = console
        self._stream = stream
        self._prefix = prefix
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
            while data := await pipe.read():
                await self._write(self._splitter.feed(data))
        finally:
            await self._write(self._splitter.finish())

    async def _write(self, lines: list[Line]) -> None:
        text = "".join(self._shown(lines))
        if text:
            await self._console.write(self._stream, text)

    def _shown(self, lines: list[Line]) -> Iterator[str]:
        prefix = self._prefix(self._stream)
        for line in lines:
            if line.overwritten:
                if time.monotonic() < self._redraw_at_s:
                    continue
                self._redraw_at_s = time.monotonic() + REDRAW_S
            else:
                self._tail.append(line.text)
            yield f"{prefix}{line.text}\n"
