"""Asks one worker how far the training is, and shows it as a bar or as plain lines."""

import asyncio
import contextlib
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from shardnet.cli.launch.console import Console
from shardnet.cli.units import short_duration, short_loss, short_number
from shardnet.errors import ShardnetError
from shardnet.observation.views import Stats
from shardnet.telemetry import Progress

POLL_S = 0.5
PLAIN_INTERVAL_S = 5.0  # between two lines if no bar can be drawn

Ask = Callable[[str], Awaitable[Stats]]  # a worker's address -> what it says of itself; ShardnetError if it cannot be had


class ProgressView:
    """Shows progress on the console; lives as long as the launch."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._first: tuple[int, float] | None = None  # step and time of the first report
        self._plain_step = 0
        self._plain_after_s = 0.0

    async def show(self, stats: Stats) -> None:
        """Redraw the bar; without a bar, write a line if the last one is old enough and there is something new."""
        now_s, progress = time.monotonic(), stats.progress
        text = describe(progress, stats.wait_share, self._remaining_s(progress, now_s))
        if self._console.interactive:
            await self._console.draw_bar(progress.step, progress.total_steps, text)
        elif progress.step != self._plain_step and now_s >= self._plain_after_s:
            self._plain_step, self._plain_after_s = progress.step, now_s + PLAIN_INTERVAL_S
            self._console.say(text)

    def _remaining_s(self, progress: Progress, now_s: float) -> float | None:
        """The remaining time at the mean speed since the first report, which does not count the start."""
        if self._first is None:
            self._first = (progress.step, now_s)
        step, since_s = self._first
        if progress.step <= step or not progress.total_steps:
            return None
        return (progress.total_steps - progress.step) * (now_s - since_s) / (progress.step - step)


async def follow(pick: Callable[[], Sequence[str]], ask: Ask, view: ProgressView) -> None:
    """Show the progress of the first worker of `pick()` that answers, twice a second until cancelled.

    A worker that does not answer is asked again later: it may have ended, which its exit shows better, or it may hang while the others of
    an elastic job go on.
    """
    while True:
        for address in pick():
            with contextlib.suppress(ShardnetError):
                stats = await ask(address)
                if stats.progress.step or stats.progress.total_steps:
                    await view.show(stats)
                break
        await asyncio.sleep(POLL_S)


def describe(progress: Progress, wait_share: float | None, remaining_s: float | None) -> str:
    """`step 120/400, loss 2.310, 45.2k tokens/s, comm wait 12 %, eta 1:23`; what is unknown is left out."""
    total = f"/{progress.total_steps}" if progress.total_steps else ""
    parts = [f"step {progress.step}{total}"]
    if not math.isnan(progress.loss):
        parts.append(f"loss {short_loss(progress.loss)}")
    if progress.tokens_per_s > 0:
        parts.append(f"{short_number(progress.tokens_per_s)} tokens/s")
    if wait_share is not None:
        parts.append(f"comm wait {wait_share:.0%}")
    if progress.note:
        parts.append(progress.note)
    if remaining_s is not None:
        parts.append(f"eta {short_duration(remaining_s)}")
    return ", ".join(parts)
