"""Finds the worker that is to blame, and describes the failure."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from shardnet.cli.launch.tracebacks import is_head

# Errors that say that another worker has failed, or was told to leave: the worker that shows one is a witness, not the culprit.
_CONSEQUENCES = frozenset({"PeerLost", "Preempted"})
# After these errors a new worker would train again what is done: from the start, as if nothing had been lost, or although all is over.
_FINAL = frozenset({"StateLost", "EndNotSaved"})
# The last line of a traceback, also inside the frame that is drawn around a member of an exception group.
_ERROR_LINE = re.compile(r"[\s|+-]*(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?::\s|:?$)")
# The line between the tracebacks of an error and of another one that was raised while it was handled.
_CHAINED = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_LOST = re.compile(r"(rank \d+) \(\S+\) lost during ")  # in a PeerLost
_WORD = re.compile(r"\w")  # not found in the frame around an exception group


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended.

    code       exit status, or minus the number of the signal that killed it
    started_s  time.monotonic() of its start
    ended_s    time.monotonic() of its end
    was_ended  the launcher had sent it a signal before
    tail       the last lines of its stderr
    """

    label: str
    code: int
    started_s: float
    ended_s: float
    was_ended: bool
    tail: tuple[str, ...]

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def left(self) -> bool:
        """Whether it got SIGTERM and has ended in its own time: a program that `shardnet.run` runs then has this status."""
        return self.code == 128 + signal.SIGTERM

    @property
    def is_consequence(self) -> bool:
        """Whether its last error says that it lost a peer, or was raised because of one that does: programs wrap errors in their own."""
        return any(name in _CONSEQUENCES for name, _ in self._last_errors)

    @property
    def blames(self) -> str | None:
        """The label of the worker that it lost, by its last error."""
        found = (lost for name, line in self._last_errors if name in _CONSEQUENCES and (lost := _LOST.search(line)))
        lost = next(found, None)
        return None if lost is None else lost.group(1)

    @property
    def is_final(self) -> bool:
        """Whether its last error says that no worker can go on, or was raised because of one that does."""
        return any(name in _FINAL for name, _ in self._last_errors)

    @property
    def _last_errors(self) -> list[tuple[str, str]]:
        """The name and the line of its last error, and then those of the errors that it was raised because of."""
        errors, lines = [], list(self.tail)
        while error := next(((match.group(1), line) for line in reversed(lines) if (match := _ERROR_LINE.match(line))), None):
            errors.append(error)
            while lines and not is_head(lines.pop()):
                pass
            while lines and not lines[-1]:
                lines.pop()
            if not lines or not _CHAINED.match(lines[-1]):
                break
        return errors

    @property
    def last_words(self) -> tuple[str, ...]:
        """The end of its stderr that tells why: from the last traceback on, or the last line."""
        heads = [number for number, line in enumerate(self.tail) if is_head(line)]
        return self.tail[heads[-1] if heads else -1 :]

    @property
    def lived_s(self) -> float:
        return self.ended_s - self.started_s

    @property
    def status(self) -> int:
        """As a shell reports it: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def how(self) -> str:
        if self.code < 0:
            return f"killed by {_signal_name(-self.code)}"
        return f"exit code {self.code}{' after SIGTERM' if self.left else ''}"

    @property
    def cause(self) -> str:
        hint = " (the system does this when memory runs out)" if self.code == -signal.SIGKILL and not self.was_ended else ""
        return f"{self.how}{hint}"


def culprit(exits: Sequence[Exit]) -> Exit | None:
    """The failure that caused the others: preferably one that the launcher did not cause, then one that is not only the loss of a peer,
    then the earliest. If that one lost a worker of this machine, it is that worker's own error: a worker that fails tells the others
    before it ends, so the launcher may end it first."""
    failures = [end for end in exits if end.failed]
    found = min(failures, key=lambda end: (end.was_ended, end.is_consequence, end.ended_s), default=None)
    own = (end for end in failures if found is not None and end.label == found.blames and end.code > 0 and not end.is_consequence)
    return next(own, found)


def last_straw(exits: Sequence[Exit]) -> Exit | None:
    """Like `culprit`, for an elastic job, which has survived all failures except the last."""
    failures = (end for end in exits if end.failed)
    return min(failures, key=lambda end: (end.was_ended, end.is_consequence, -end.ended_s), default=None)


def announce(failure: Exit, what_follows: str) -> str:
    """The message for the user while the job goes on. The worker's output is above it; its last line may be far up."""
    if failure.left:
        return f"{failure.label} left after SIGTERM; {what_follows}"
    head = f"{failure.label} failed: {failure.cause}; {what_follows}"
    last_line = next((line for line in reversed(failure.tail) if _WORD.search(line)), None)
    if failure.code == -signal.SIGKILL:  # it could write nothing about that: its last line is about something else
        return head
    return head if last_line is None else f"{head}. Its last line on stderr:\n    {last_line.strip()}"


def describe_losses(lost: Sequence[Exit], replaced: Sequence[Exit]) -> str:
    """The message for the user when an elastic job has succeeded in spite of losses."""
    told = [(end, end.how) for end in lost] + [(end, f"{end.how}, replaced") for end in replaced]
    told.sort(key=lambda loss: loss[0].ended_s)
    count = "1 worker" if len(told) == 1 else f"{len(told)} workers"
    went = "left" if all(end.left for end, _ in told) else f"{'was' if len(told) == 1 else 'were'} lost"
    return f"{count} {went} on the way: {', '.join(f'{end.label} ({how})' for end, how in told)}"


def describe(failure: Exit, others: int, least: int | None = None, *, stands_above: bool = False) -> str:
    """The last message for the user, with the worker's own error as the last line of all.

    others        how many workers were ended because of it
    least         how many workers an elastic job needs, if fewer were left
    stands_above  the end of its stderr is directly above this message
    """
    ended = f"; {others} other{'s' if others > 1 else ''} ended with it" if others else ""
    too_few = f"; fewer than {least} workers cannot go on" if least is not None and least > 1 else ""
    if failure.left:
        return f"{failure.label} left after SIGTERM{ended}{too_few}"
    head = f"{failure.label} failed: {failure.cause}{ended}{too_few}"
    if not failure.tail:
        return f"{head}. It wrote nothing to stderr."
    if stands_above:
        return f"{head}. The end of its stderr stands above."
    return "\n".join([f"{head}. The end of its stderr:", *(f"    {line}" for line in failure.tail)])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
