"""Which worker is to blame, and how that is told."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

# Errors that say "somebody else has failed": the worker that shows one is a witness, not the culprit.
_CONSEQUENCES = frozenset({"PeerLost", "MembershipLost"})
# The last line of a traceback, also inside the frame that is drawn around a member of an exception group.
_ERROR_LINE = re.compile(r"[\s|+-]*(?:[A-Za-z_]\w*\.)*([A-Z]\w*)(?::\s|:?$)")


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended.

    code       exit status, or minus the number of the signal that killed it
    started_s  time.monotonic() of its start
    ended_s    and of its end
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
    def is_consequence(self) -> bool:
        """Whether its last error says that it lost a peer."""
        errors = (match.group(1) for line in reversed(self.tail) if (match := _ERROR_LINE.match(line)))
        return next(errors, None) in _CONSEQUENCES

    @property
    def status(self) -> int:
        """As a shell reports it: 128 + n for signal n."""
        return self.code if self.code >= 0 else 128 - self.code

    @property
    def cause(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        name = _signal_name(-self.code)
        hint = " (the system does this when memory runs out)" if name == "SIGKILL" and not self.was_ended else ""
        return f"killed by {name}{hint}"


def culprit(exits: Sequence[Exit]) -> Exit | None:
    """The failure that the others follow from: not one that the launcher caused, rather not one that only lost a peer, the first."""
    failures = (end for end in exits if end.failed)
    return min(failures, key=lambda end: (end.was_ended, end.is_consequence, end.ended_s), default=None)


def describe(failure: Exit, others: int) -> str:
    """What the user reads last, with the worker's own error as the last line of all. `others`: workers ended because of it."""
    ended = f"; {others} other{'s' if others > 1 else ''} ended with it" if others else ""
    head = f"{failure.label} failed: {failure.cause}{ended}"
    if not failure.tail:
        return f"{head}. It wrote nothing to stderr."
    return "\n".join([f"{head}. The end of its stderr:", *(f"    {line}" for line in failure.tail)])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
