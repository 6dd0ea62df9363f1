"""`FlightRecorder`: the last collectives of a rank, to show what the rank was doing when something went wrong.

A record is made when a collective is called and updated as it goes on, so the ring also shows collectives that have not ended.
Records are always kept: one costs about a microsecond, and nobody knows beforehand that it will be needed.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

RING_SIZE = 256  # collectives: some steps of a model of 30 units; about 60 KB


class State(StrEnum):
    """How far a collective has come on this rank."""

    BEGUN = "begun"  # called: it waits for its turn, or for data
    WAITING = "waiting"  # for ranks that, as far as this one knows, have not entered it
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Party:
    """The ranks whose collectives share one sequence of numbers; for one epoch."""

    epoch: int
    group: int  # 0: everyone
    members: tuple[int, ...]  # global ranks
    channel: str = ""  # the tag, sender and receiver, if it is a channel for sends

    @property
    def title(self) -> str:
        if self.channel:
            return f"the channel {self.channel}"
        return "the world" if self.group == 0 else f"the group of ranks {list(self.members)}"


@dataclass(slots=True, eq=False)
class Flight:
    """One collective of this rank. Times are `time.perf_counter_ns`, 0 for what has not happened yet."""

    party: Party
    sequence: int
    op: str
    label: str
    step: int  # the training's step when it was called
    begun_ns: int
    entered_ns: int = 0  # when its turn came
    ended_ns: int = 0
    bytes_sent: int = 0  # payload, by this rank
    state: State = State.BEGUN
    error: str = ""  # the class name of its error

    @property
    def name(self) -> str:
        """As errors name it: `all_gather #841 of layer4.mlp`."""
        return f"{self.op} #{self.sequence}" + (f" of {self.label}" if self.label else "")

    @property
    def full_name(self) -> str:
        """The name with the group: `all_gather #841 of layer4.mlp of the group of ranks [0, 2]`, or
        `send #3 of the channel 'logits' from rank 0 to rank 2`."""
        return self.name + (f" of {self.party.title}" if self.party.group else "")


class FlightRecorder:
    """A ring of one rank's collectives; lives as long as its telemetry, over all epochs. Any thread may call it."""

    def __init__(self, size: int = RING_SIZE) -> None:
        self._ring: deque[Flight] = deque(maxlen=size)
        self.on_failure: Callable[[Flight, BaseException], None] | None = None  # called by the thread that ends it: short, raises nothing

    def begin(self, flight: Flight) -> Flight:
        self._ring.append(flight)
        return flight

    def end(self, flight: Flight, ended_ns: int, error: BaseException | None) -> None:
        flight.ended_ns = ended_ns
        if error is None:
            flight.state = State.DONE
            return
        flight.state, flight.error = State.FAILED, type(error).__name__
        if self.on_failure is not None:
            self.on_failure(flight, error)

    def last(self, count: int = RING_SIZE) -> list[Flight]:
        """The newest ones, oldest first."""
        return list(self._ring)[-count:]
