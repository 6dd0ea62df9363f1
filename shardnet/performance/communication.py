"""`CommunicationStats`: what was sent between ranks, by kind of operation."""

from dataclasses import dataclass, field
from enum import StrEnum

from shardnet.performance.throughput import NS

REFERENCE_BYTES_PER_S = 1e10  # communication as fast as this, or faster, has efficiency 1


class CommunicationOperation(StrEnum):
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "point_to_point"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"


@dataclass(slots=True)
class OperationTotals:
    """The operations of one kind: their number, time in ns, and bytes."""

    operations: int = 0
    time: int = 0
    bytes: int = 0

    @property
    def bandwidth(self) -> float:
        """Bytes/s; 0 before the first."""
        return self.bytes * NS / self.time if self.time else 0.0

    def add(self, operations: int, time: int, bytes: int) -> None:
        self.operations += operations
        self.time += time
        self.bytes += bytes


def _nothing() -> dict[CommunicationOperation, OperationTotals]:
    return {operation: OperationTotals() for operation in CommunicationOperation}


@dataclass(slots=True)
class CommunicationStats:
    """Totals of every kind of operation, and their efficiency: 1 until there are both bytes and time."""

    totals: dict[CommunicationOperation, OperationTotals] = field(default_factory=_nothing)
    communication_efficiency: float = 1.0

    def record(self, operation: CommunicationOperation, duration: int, bytes: int) -> None:
        self.totals[CommunicationOperation(operation)].add(1, duration, bytes)
        self._update()

    def merge(self, other: "CommunicationStats") -> None:
        for operation, totals in other.totals.items():
            self.totals[operation].add(totals.operations, totals.time, totals.bytes)
        self._update()

    def _update(self) -> None:
        time = sum(totals.time for totals in self.totals.values())
        moved = sum(totals.bytes for totals in self.totals.values())
        if time and moved:
            self.communication_efficiency = min(1.0, moved * NS / time / REFERENCE_BYTES_PER_S)
