"""`Tracebacks`: those in a worker's output, each in one piece, and in one line where another worker has just shown the same.

[Note: told once] A mistake in a program is on all ranks. Each writes the same traceback, line by line and at the same time, so that they
are mixed, and the first one has left the screen when the last one has come. What it says of the rank that wrote it does not count.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

HELD_S = 0.2  # from its first line on; by then the rest of it is there, or the worker is busy with something else
_NEAR_LINES = 200  # what is further up is not referred to
_HEAD = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
_GROUP = re.compile(r"  \| (\S*ExceptionGroup: .*)$")  # how the outermost one is called
_REFERENCE = re.compile(r" \(with the traceback of [^()]+\)$")
_RANK = re.compile(r"\[rank \d+/")  # with which our errors begin


def is_reference(line: str) -> bool:
    """Whether that line stands for a traceback that another worker has shown."""
    return _REFERENCE.search(line) is not None


def of_any_rank(text: str) -> str:
    """What several ranks have said alike, without who it was."""
    return _RANK.sub("[rank /", text)


def is_head(line: str) -> bool:
    """Whether a traceback begins with that line."""
    return _HEAD.match(line) is not None


@dataclass(frozen=True, slots=True)
class _Shown:
    owner: object
    label: str
    line: int  # so many had been written before


class Told:
    """Which tracebacks have been shown of late, and whose."""

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = {}
        self._lines = 0

    def count(self, lines: int) -> None:
        """So many lines have been written, of whatever kind."""
        self._lines += lines

    def whose(self, text: str, owner: object, label: str) -> str | None:
        """What that one is called who has shown it, if it is somebody else; None: `owner`, called `label`, is to show it now."""
        key = of_any_rank(text)
        self._shown = {each: shown for each, shown in self._shown.items() if self._lines - shown.line <= _NEAR_LINES}
        shown = self._shown.setdefault(key, _Shown(owner, label, self._lines))
        return None if shown.owner is owner else shown.label

    def forget(self) -> None:
        """Somebody begins anew: what comes is about another life."""
        self._shown.clear()


class Tracebacks:
    """One stream's. Lines go in, and those to be shown now come out. A traceback is held until a line comes that is none of it.

    label  whose stream it is; asked for every traceback
    """

    def __init__(self, told: Told, label: Callable[[], str]) -> None:
        self._told = told
        self._label = label
        self._held: list[str] = []
        self._error: str | None = None  # of the one that is held: its last line, or what stands for it
        self._until_s = 0.0
        self._is_group = False

    @property
    def held_s(self) -> float | None:
        """How long what is held may still be held; None: nothing is."""
        return max(0.0, self._until_s - time.monotonic()) if self._held else None

    def feed(self, line: str) -> list[str]:
        if self._held and time.monotonic() < self._until_s and self._continues(line):
            self._held.append(line)
            return []
        shown = self.release()
        if head := _HEAD.match(line):
            self._held, self._until_s = [line], time.monotonic() + HELD_S
            self._is_group = head.group(1) is not None
            return shown
        return [*shown, line]

    def release(self) -> list[str]:
        """What is held, as it is to be shown."""
        held, error = self._held, self._error
        self._held, self._error = [], None
        whose = None if error is None else self._told.whose("\n".join(held), self, self._label())
        return held if whose is None else [f"{error} (with the traceback of {whose})"]

    def _continues(self, line: str) -> bool:
        """Frames are indented, and so are members of a group and what a message has below its first line."""
        if self._is_group:
            if self._error is None and (group := _GROUP.match(line)):
                self._error = group.group(1)
            return line.startswith(" ")
        if line[:1] in (" ", "\t"):
            return True
        is_error = self._error is None and bool(line) and not is_head(line)
        if is_error:
            self._error = line
        return is_error
