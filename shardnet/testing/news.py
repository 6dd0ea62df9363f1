"""What the run of a test's cluster hears of its workers. `number` is a worker's own, in the order in which they were started."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardnet.testing.rank_failure import RankFailure


@dataclass(frozen=True, slots=True)
class Joined:
    """It has a rank, and begins to train."""

    number: int
    rank: int


@dataclass(frozen=True, slots=True)
class Fired:
    """The moment of a fault has come. The worker waits for `done` where others have to do it."""

    number: int
    fault: int
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """It is through with its part."""

    number: int
    result: Any = None
    failure: RankFailure | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing is left of it but what it has written."""

    number: int


@dataclass(frozen=True, slots=True)
class Doing:
    """What one does that has not ended, as it says when it is asked.

    waits_for  ranks that have not entered a collective in which it has waited for long
    """

    stacks: str = ""
    waits_for: Sequence[int] = ()


News = Joined | Fired | Ended | Gone
