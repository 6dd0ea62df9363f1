"""What shardnet wants to reach, and whether a run did."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.plan import Op, Topology, Transport
from benchmarks.row import Row, collectives
from shardnet.config import MIB

SIZES = (MIB, 16 * MIB, 64 * MIB)  # that count; below them it is latency that is measured


@dataclass(frozen=True, slots=True)
class Target:
    """The least geometric mean of ratios over `ops` and SIZES that will do, at each number of ranks."""

    topology: Topology
    transport: Transport
    ops: tuple[Op, ...]
    ratio: float

    @property
    def name(self) -> str:
        return " + ".join(self.ops)

    @property
    def cases(self) -> int:
        return len(self.ops) * len(SIZES)


TARGETS = (
    Target(Topology.ONE_NODE, Transport.GRPC, (Op.ALL_GATHER, Op.REDUCE_SCATTER), 1.0),
    Target(Topology.ONE_NODE, Transport.GRPC, (Op.ALL_REDUCE,), 0.6),
    Target(Topology.ONE_NODE, Transport.SHM, tuple(Op), 5.0),
    Target(Topology.NETNS, Transport.GRPC, (Op.ALL_GATHER, Op.REDUCE_SCATTER), 1.3),
    Target(Topology.NETNS, Transport.GRPC, (Op.ALL_REDUCE,), 1.0),
    Target(Topology.NETNS_1GBIT, Transport.HIER, tuple(Op), 1.8),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one target fared at one number of ranks. `met` is None where not all of its ops and sizes were measured."""

    target: Target
    ranks: int
    mean: float
    cases: int
    met: bool | None


def judge(rows: Sequence[Row]) -> list[Outcome]:
    """One outcome a target and number of ranks for which anything was measured."""
    counting = [row for row in collectives(rows) if row.bytes in SIZES]
    ranks = sorted({row.ranks for row in counting})
    return [outcome for count in ranks for target in TARGETS if (outcome := _judge(target, count, counting)) is not None]


def _judge(target: Target, ranks: int, rows: Iterable[Row]) -> Outcome | None:
    place = (ranks, target.topology, target.transport)
    ratios = {(row.op, row.bytes): row.ratio for row in rows if (row.ranks, row.topology, row.transport) == place and row.op in target.ops}
    if not ratios:
        return None
    mean = geometric_mean(ratios.values())
    complete = len(ratios) == target.cases
    return Outcome(target, ranks, mean, len(ratios), mean >= target.ratio if complete else None)


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
