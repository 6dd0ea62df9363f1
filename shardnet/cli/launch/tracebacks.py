"""`Tracebacks`: keeps each traceback in a worker's output in one piece, and shortens it to one line if another worker has just shown it.

[Note: told once] A mistake in a program fails on all ranks. All write the same traceback, line by line and at the same time, so that the
lines are mixed, and the first traceback has left the screen before the last one is complete. Two tracebacks that differ only in the rank
that wrote them count as the same.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

HELD_S = 0.2  # from a traceback's first line on; by then the rest of it is there, or the worker is busy with something else
_NEAR_LINES = 200  # a traceback further up is not referred to
_HEAD = re.compile(r"(  \+ Exception Group )?Traceback \(most recent call last\):$")
_GROUP = re.compile(r"  \| (\S*ExceptionGroup: .*)$")  # the line that names the outermost group
_REFERENCE = re.compile(r" \(with the traceback of [^()]+\)$")
_RANK = re.compile(r"\[rank \d+/")  # the beginning of our errors
_TORCH = re.compile(r"\[rank(\d+)\]: ")  # before each line of a traceback in a program of torch.distributed


def is_reference(line: str) -> bool:
    """Whether the line stands for a traceback that another worker has shown."""
    return _REFERENCE.search(line) is not None


def of_any_rank(text: str) -> str:
    """The text without the rank that wrote it, to compare texts of several ranks."""
    return _RANK.sub("[rank /", text)


def is_head(line: str) -> bool:
    """Whether a traceback begins with the line."""
    return _HEAD.match(line) is not None


@dataclass(frozen=True, slots=True)
class _Shown:
    owner: object
    label: str
    line: int  # how many lines had been written before


class Told:
    """The tracebacks that have been shown recently, with the worker that showed each."""

    def __init__(self) -> None:
        self._shown: dict[str, _Shown] = {}
        self._lines = 0

    def count(self, lines: int) -> None:
        """Take note that `lines` lines of any kind have been written."""
        self._lines += lines

    def whose(self, text: str, owner: object, label: str) -> str | None:
        """The label of the other worker that has shown the traceback already; None: `owner`, called `label`, should show it now."""
        key = of_any_rank(text)
        self._shown = {each: shown for each, shown in self._shown.items() if self._lines - shown.line <= _NEAR_LINES}
        shown = self._shown.setdefault(key, _Shown(owner, label, self._lines))
        return None if shown.owner is owner else shown.label

    def forget(self) -> None:
        """Forget all: a worker starts again, and its errors must be shown again."""
        self._shown.clear()


class Tracebacks:
    """The tracebacks of one stream. Lines go in, and the lines to show now come out. A traceback is held until a line comes that does not
    belong to it.

    label  returns the name of the stream's worker; called for every traceback
    """

    def __init__(self, told: Told, label: Callable[[], str]) -> None:
        self._told = told
        self._label = label
        self._held: list[str] = []
        self._error: str | None = None  # of the held traceback: its last line, or the line that stands for it
        self._until_s = 0.0
        self._is_group = False

    @property
    def held_s(self) -> float | None:
        """How long the held lines may still be held; None: no lines are held."""
        return max(0.0, self._until_s - time.monotonic()) if self._held else None

    def bare(self, line: str) -> str:
        """The line without the worker's rank, if torch has put that before it: the launcher puts one there, too."""
        found = _TORCH.match(line)
        return line[found.end() :] if found is not None and f"rank {found.group(1)}" == self._label() else line

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
        """The held lines in the form in which they are shown."""
        held, error = self._held, self._error
        self._held, self._error = [], None
        whose = None if error is None else self._told.whose("\n".join(held), self, self._label())
        return held if whose is None else [f"{error} (with the traceback of {whose})"]

    def _continues(self, line: str) -> bool:
        """Whether the line belongs to the traceback: frames are indented, and so are members of a group and further lines of a message."""
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
