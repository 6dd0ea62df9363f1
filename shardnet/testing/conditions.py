"""`Conditions`: what a link is like, and `Way`: which way along it."""

from dataclasses import dataclass
from enum import Enum

from shardnet.errors import UsageError


class Way(Enum):
    """Which way something goes through a relay; `tuple(Way)` is both."""

    IN = "to the target"
    OUT = "from the target"


BOTH = tuple(Way)


@dataclass(frozen=True, slots=True)
class Conditions:
    """Of a relay's link, in each direction; those of a fast local network if nothing is said.

    latency_s    how long each byte is under way
    jitter_s     up to so much more, at random; what was sent first still comes first
    bytes_per_s  how much passes, over all connections together; 0: as much as may
    slice_bytes  in pieces of so many bytes at most, each a segment of its own; 0: as they come

    Raises UsageError for values that make no sense.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    bytes_per_s: float = 0.0
    slice_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 0:
                raise UsageError(f"{name} of a link must not be negative, got {getattr(self, name)}")
