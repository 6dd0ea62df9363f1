"""`Recovery`: what follows when a worker of an elastic job fails.

[Note: elastic] The program of an elastic job goes on when a worker has died: with the others, or with a new worker in its place.
So the launcher leaves the others alone, as long as enough are left.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shardnet.cli.launch.failure import Exit, announce


@dataclass(frozen=True, slots=True)
class Pauses:
    """The pause before a replacement starts: none, unless the worker before it died young. A program that always fails at once would
    otherwise keep the machine busy."""

    first_s: float = 0.5  # each further pause in a row is twice as long
    longest_s: float = 10.0
    young_s: float = 10.0

    def after(self, failure: Exit, last_s: float | None) -> float:
        """`last_s`: the pause before the start of the worker that has just failed, None if it was the first of its place."""
        if last_s is None or failure.lived_s >= self.young_s:
            return 0.0
        return min(max(self.first_s, 2 * last_s), self.longest_s)


class Recovery:
    """Decides which workers are replaced, and whether the others go on; lives as long as the launch.

    restarts  the largest number of replacements in total
    least     the number of workers that this machine needs so that the others can go on
    say       tells the user a line
    """

    def __init__(self, restarts: int, least: int, say: Callable[[str], None], pauses: Pauses | None = None) -> None:
        self._restarts = restarts
        self._least = least
        self._say = say
        self._pauses = pauses or Pauses()
        self._used = 0
        self._last_s: dict[object, float] = {}

    def replace(self, place: object, failure: Exit, others: int) -> float | None:
        """The pause before its replacement, None if it gets none. `others`: places whose workers run or will be replaced."""
        if self._used == self._restarts or others + 1 < self._least:  # the replacement would wait for peers that have left
            return None
        self._used += 1
        pause_s = self._last_s[place] = self._pauses.after(failure, self._last_s.get(place))
        when = f" in {pause_s:g} s" if pause_s else ""
        self._say(announce(failure, f"restarting it{when} ({self._used} of {self._restarts})"))
        return pause_s

    def go_on(self, failure: Exit, others: int, done: int) -> bool:
        """Whether the others can go on without it. `done`: workers that have ended with success; they are not missing."""
        if others + done < self._least:
            return False
        if others:
            self._say(announce(failure, "the others go on"))
        return True
