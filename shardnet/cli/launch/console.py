"""`Console`: the terminal or files that the launcher writes to, shared by all workers and the progress bar."""

import asyncio
import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TextIO

from tqdm import tqdm

from shardnet.cli.launch.tracebacks import Told, is_reference, of_any_rank

_RECENT_LINES = 100
_COLOURS = (36, 33, 32, 35, 34, 31)  # ANSI: cyan, yellow, green, magenta, blue, red


class _Bar(tqdm):  # type: ignore[type-arg]  # it counts and iterates over nothing
    monitor_interval = 0  # no thread that redraws: the console's own thread draws every change


class Console:
    """Writes whole lines, in the order in which they were given, above a progress bar at the bottom if there is one.

    A thread of its own does the writing: a terminal that was paused, or a pager that nobody scrolls, must not stop
    the event loop, which answers the workers' rendezvous and the user's signals.

    A context manager; leaving it writes all lines that were given and removes the bar.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = out or sys.stdout
        self.err = err or sys.stderr
        self.interactive = self.err.isatty()  # the bar is drawn on stderr, so that stdout can be redirected
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardnet-console")
        self._bar: _Bar | None = None
        self._recent: deque[str] = deque(maxlen=_RECENT_LINES)  # without their prefixes
        self._is_one_place = self.out.isatty() == self.err.isatty()  # as far as one can tell
        self.told = Told()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove_bar()
        self._thread.shutdown(wait=True)

    def prefix(self, label: str, number: int, stream: TextIO) -> str:
        """`[label] `, in the colour of `number` if colours can be seen and are wanted (https://no-color.org)."""
        if not stream.isatty() or os.environ.get("NO_COLOR"):
            return f"[{label}] "
        return f"\x1b[{_COLOURS[number % len(_COLOURS)]}m[{label}]\x1b[0m "

    async def write(self, stream: TextIO, lines: Sequence[str], prefix: str = "") -> None:
        """Write lines to `self.out` or `self.err`, each after the prefix; returns when they are written. Raises OSError.

        Cancelling does not take back lines that were given.
        """
        if stream is self.err or self._is_one_place:
            self._note(lines)
        text = "".join(f"{prefix}{line}\n" for line in lines)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._write, stream, text)

    def say(self, text: str) -> None:
        """Write a line of the launcher's own to stderr, without waiting for it; fit for signal handlers of the loop."""
        self._note(text.split("\n"))
        self._thread.submit(self._write, self.err, f"shardnet: {text}\n")

    def ends_with(self, lines: Sequence[str]) -> bool:
        """Whether these are the last lines on the launcher's own stream, each after any prefix, written by any rank. References to the same
        traceback of other workers after them do not count."""
        recent = [line for line in self._recent if not is_reference(line)]
        return [*map(of_any_rank, lines)] == [*map(of_any_rank, recent[max(0, len(recent) - len(lines)) :])]

    def _note(self, lines: Sequence[str]) -> None:
        self._recent += lines
        self.told.count(len(lines))

    async def draw_bar(self, step: int, total: int, text: str) -> None:
        """Draw or redraw the bar. It exists from the first call on."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._draw_bar, step, total, text)

    def remove_bar(self) -> None:
        """Remove the bar, after the lines that were given before; then later lines are the last ones on the screen."""
        self._thread.submit(self._remove_bar)

    def _write(self, stream: TextIO, text: str) -> None:
        if self._bar is not None:
            self._bar.clear()
            self.err.flush()  # out and err may be one terminal: the bar must be removed before the text is written
        try:
            stream.write(text)
            stream.flush()
        except OSError as error:  # it does not say which file is meant
            raise OSError(error.errno, error.strerror, "standard output" if stream is self.out else "standard error") from error
        if self._bar is not None:
            self._bar.refresh()

    def _draw_bar(self, step: int, total: int, text: str) -> None:
        if self._bar is None:
            tqdm.set_lock(threading.RLock())  # the default lock is for several processes, and needs a semaphore of the system
            self._bar = _Bar(file=self.err, dynamic_ncols=True, leave=False, bar_format="{percentage:3.0f}% |{bar:30}| {desc}")
        self._bar.total = max(total, step, 1)
        self._bar.n = step
        self._bar.set_description_str(text)

    def _remove_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError):
                bar.close()
