"""`RankFailure`: how one rank of a test's cluster has failed; `RanksFailed`: the error that contains all failures."""

import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from shardnet.errors import PeerLost

_OF_OTHERS = {PeerLost.__name__}  # errors of ranks that fail because another one has failed
# One calls the training function, and the other one `shardnet.run`, which leaves that call out of a traceback
_CALLERS = [str(Path(__file__).with_name(name)) for name in ("part.py", "process.py")]


@dataclass(frozen=True, slots=True)
class RankFailure:
    """An error, kept as text because it may come from another process.

    kind       name of its class, "ValueError"; "Died" if a process ended without an error, "Hung" if the time was over
    message    its str()
    traceback  as Python prints it
    error      the error itself, if the rank is in this process
    rank       -1 for a worker that never joined
    waits_for  ranks for which a rank that hung was waiting
    """

    kind: str
    message: str
    traceback: str = ""
    error: BaseException | None = None
    rank: int = -1
    waits_for: Sequence[int] = ()

    @classmethod
    def of(cls, error: BaseException) -> "RankFailure":
        lines = traceback.format_exception(type(error), error, _below_the_kit(error.__traceback__))
        try:
            message = str(error)
        except Exception as another:  # noqa: BLE001 - of whatever kind
            message = f"(no text, because str() of the error raised {another!r})"
        return cls(type(error).__name__, message, "".join(lines), error)

    @property
    def who(self) -> str:
        return "a worker that had not joined" if self.rank < 0 else f"rank {self.rank}"

    def __str__(self) -> str:
        return f"{self.who}: {self.kind}: {self.message}"


class RanksFailed(Exception):
    """Ranks of a test's cluster have failed. `failures` has all failures, `first` the one that seems to have caused the others."""

    def __init__(self, failures: Sequence[RankFailure], world_size: int) -> None:
        """`failures` are in the order in which they were reported."""
        self.first = min(failures, key=lambda failure: (failure.kind in _OF_OTHERS or bool(failure.waits_for), failure.rank < 0))
        self.failures = [self.first, *sorted((each for each in failures if each is not self.first), key=lambda failure: failure.rank)]
        self._world_size = world_size
        super().__init__(failures, world_size)

    @property
    def skip(self) -> BaseException | None:
        """The exception of `pytest.skip()` from ranks of this process, if the other ranks have only lost these."""
        pytest: Any = sys.modules.get("pytest")  # a program that has called it has imported it
        if pytest is None or not isinstance(self.first.error, pytest.skip.Exception):
            return None
        others = (failure for failure in self.failures if failure.kind not in _OF_OTHERS)
        return self.first.error if all(isinstance(failure.error, pytest.skip.Exception) for failure in others) else None

    def of_rank(self, rank: int) -> RankFailure:
        """The failure of a rank. Raises KeyError if it has none."""
        for failure in self.failures:
            if failure.rank == rank:
                return failure
        raise KeyError(rank)

    def __str__(self) -> str:
        lines = [f"{len(self.failures)} of {self._world_size} ranks failed, first {self.first}"]
        lines += [f"  {line}" for line in self.first.traceback.rstrip().splitlines()]
        lines += [f"then {failure}" for failure in self.failures[1:]]
        return "\n".join(lines)


def _below_the_kit(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from where the user's code begins; the whole one if it did not reach that."""
    found, each = trace, trace
    while each is not None:
        if each.tb_frame.f_code.co_filename in _CALLERS and each.tb_next is not None:
            found = each.tb_next
        each = each.tb_next
    return found
