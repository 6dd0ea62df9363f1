"""`Waiting`: a collective that has waited for long, and the ranks that it waits for."""

import time
from dataclasses import dataclass

from shardnet.flight import Flight


@dataclass(frozen=True, slots=True)
class Absent:
    """A rank that has not entered a collective, and where it was when it was asked."""

    rank: int
    address: str
    next_sequence: int | None = None  # which it will enter next; None: it did not answer
    last_entered: str = ""  # what the newest one is that it did enter

    def __str__(self) -> str:
        if self.next_sequence is None:
            return f"rank {self.rank} ({self.address}, no answer)"
        return f"rank {self.rank} (at #{self.next_sequence}, last entered {self.last_entered or 'nothing'})"


@dataclass(frozen=True, slots=True)
class Waiting:
    """A collective of this rank that others have not entered after `Timeouts.suspect_s`; true until it ends."""

    flight: Flight
    absent: tuple[Absent, ...]

    @property
    def seconds(self) -> float:
        return (time.perf_counter_ns() - self.flight.entered_ns) / 1e9

    @property
    def is_over(self) -> bool:
        return bool(self.flight.ended_ns)

    def __str__(self) -> str:
        return f"waits {self.seconds:.1f} s in {self.flight.full_name} for {'; '.join(map(str, self.absent))}"
