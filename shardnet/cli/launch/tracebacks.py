"""`Tracebacks`: those in a worker's output, each in one piece, and in one line where another worker has shown the same.

[Note: told once] A mistake in a program is on all ranks. Each writes the same traceback, line by line and at the same time, so that they
are mixed, and the first one has left the screen when the last one has come. What it says of the rank that wrote it does not count.
"""

import re
from collections.abc import Callable

HELD_S = 0.2  # so long the next line of a traceback is waited for; what is there of it is shown then
_HELD_LINES = 500  # as many as a recursion without end has, several times over
_TOLD = 64  # of a launch: who logs errors all the time must not fill the launcher's memory
_HEAD = "Traceback (most recent call last):"
_RANK = re.compile(r"\[rank \d+/")  # with which our errors begin


class Told:
    """Which tracebacks a launch has shown last, and whose."""

    def __init__(self) -> None:
        self._whose: dict[str, str] = {}

    def whose(self, text: str, label: str) -> str:
        """Whose traceback it was when it was shown first; now it is shown as that of `label` if it was not yet."""
        whose = self._whose.setdefault(_RANK.sub("[rank /", text), label)
        if len(self._whose) > _TOLD:
            del self._whose[next(iter(self._whose))]
        return whose


class Tracebacks:
    """One stream's. Lines go in, and those to be shown now come out.

    label  whose stream it is; asked for every traceback
    """

    def __init__(self, told: Told, label: Callable[[], str]) -> None:
        self._told = told
        self._label = label
        self._held: list[str] = []

    @property
    def is_within(self) -> bool:
        """One has begun and is held back."""
        return bool(self._held)

    def feed(self, line: str) -> list[str]:
        if not self._held and line != _HEAD:
            return [line]
        if line == _HEAD:  # the one before has broken off
            before = self.release()
            self._held = [line]
            return before
        self._held.append(line)
        if line.startswith(" "):
            return self.release() if len(self._held) > _HELD_LINES else []
        label = self._label()
        whose = self._told.whose("\n".join(self._held), label)
        held = self.release()
        return held if whose == label else [f"{line} (with the traceback of {whose})"]

    def release(self) -> list[str]:
        """What is held, as it is."""
        held, self._held = self._held, []
        return held
