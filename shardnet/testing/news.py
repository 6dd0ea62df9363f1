"""What the run of a test's cluster hears from its workers. `number` is a worker's number, in the order in which they were started."""

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
    """The moment of a fault has come. The worker waits for `done` if others have to carry it out."""

    number: int
    fault: int
    done: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Ended:
    """It has finished its part."""

    number: int
    result: Any = None
    failure: RankFailure | None = None


@dataclass(frozen=True, slots=True)
class Gone:
    """Nothing is left of it except its output."""

    number: int


@dataclass(frozen=True, slots=True)
class Doing:
    """What a worker that has not ended is doing, as it answers when asked.

    waits_for  ranks that have not entered a collective in which it has waited for long
    """

    stacks: str = ""
    waits_for: Sequence[int] = ()


News = Joined | Fired | Ended | Gone
