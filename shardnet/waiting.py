"""`Waiting`: a collective that has waited for long, and the ranks that it waits for. `Lateness` and `Stalls`: totals of such waiting."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from shardnet.flight import Flight

LATE_NS = 200_000  # ranks that come at the same time are usually less apart; and a longer wait sleeps, so that counting it costs nothing


@dataclass(frozen=True, slots=True)
class Absent:
    """A rank that has not entered a collective, and where it was when it was asked."""

    rank: int
    address: str
    next_sequence: int | None = None  # the number of the collective that it will enter next; None: it did not answer
    last_entered: str = ""  # the last collective that it entered; unknown for a channel that was retired
    waits_in: str = ""  # a collective of another group in which it waits itself, as happens when ranks take different branches

    def __str__(self) -> str:
        if self.next_sequence is None:
            return f"rank {self.rank} ({self.address}, no answer)"
        last = f", last entered {self.last_entered or 'nothing'}" if self.last_entered or not self.next_sequence else ""
        elsewhere = f"; it waits in {self.waits_in}" if self.waits_in else ""
        return f"rank {self.rank} (at #{self.next_sequence}{last}{elsewhere})"


@dataclass(slots=True)
class Lateness:
    """How long this rank has waited for another one to enter its collectives; for one epoch."""

    count: int = 0  # of waits
    seconds: float = 0.0  # each moment counts once, however many collectives waited at the same time
    until_ns: int = 0  # the time up to which `seconds` is counted

    def add(self, start_ns: int, end_ns: int) -> None:
        """Count one more wait, which has ended."""
        self.count += 1
        if end_ns > self.until_ns:
            self.seconds += (end_ns - max(start_ns, self.until_ns)) / 1e9
            self.until_ns = end_ns


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


@dataclass(slots=True)
class Stalls:
    """All epochs' collectives that others had not entered after `Timeouts.suspect_s`. One thread writes, any may read."""

    count: int = 0
    _ended_s: float = 0.0
    _open: set[Flight] = field(default_factory=set)  # those that may still wait

    @property
    def seconds(self) -> float:
        """The total time that they took, each from its entry to its end, or up to now."""
        return self._ended_s + sum(map(_seconds, tuple(self._open)))

    def note(self, waiting: Iterable[Waiting]) -> None:
        """Note which collectives wait now; the same ones as before, or others."""
        flights = {each.flight for each in waiting}
        self.count += len(flights - self._open)
        ended = {flight for flight in self._open - flights if flight.ended_ns}
        self._open = self._open - ended | flights
        self._ended_s += sum(map(_seconds, ended))


def _seconds(flight: Flight) -> float:
    return ((flight.ended_ns or time.perf_counter_ns()) - flight.entered_ns) / 1e9
