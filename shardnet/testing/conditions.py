"""`Conditions`: the properties of a link, and `Way`: a direction on it."""

from dataclasses import dataclass
from enum import Enum

from shardnet.errors import UsageError


class Way(Enum):
    """The direction in which something goes through a relay; `tuple(Way)` is both."""

    IN = "to the target"
    OUT = "from the target"


BOTH = tuple(Way)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The properties of a relay's link, in each direction; by default those of a fast local network.

    latency_s    how long each byte takes
    jitter_s     a random extra time of up to this much; bytes still arrive in the order in which they were sent
    bytes_per_s  the bandwidth of all connections together; 0: unlimited
    slice_bytes  bytes pass in pieces of at most this size, each a segment of its own; 0: as they come

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
