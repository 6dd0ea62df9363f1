"""What shardnet wants to reach, and whether a run did."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.plan import COLLECTIVES, Op, Topology, Transport
from benchmarks.row import Row, collectives, steps
from shardnet.config import KIB, MIB

SIZES = (MIB, 16 * MIB, 64 * MIB)
SMALL = (KIB, 64 * KIB)  # of which it is latency that is measured
GLOO = "gloo"
MEMCPY = "memcpy"
LINK = "link's bound"


@dataclass(frozen=True, slots=True)
class Target:
    """The least geometric mean of ratios to `peer` over `ops` and `sizes` that will do, at each number of ranks."""

    topology: Topology
    transport: Transport
    ops: tuple[Op, ...]
    ratio: float
    peer: str = GLOO
    sizes: tuple[int, ...] = SIZES

    @property
    def name(self) -> str:
        name = " + ".join(self.ops) + ("" if self.peer == GLOO else f" ({self.peer} / shardnet)")
        return name if self.sizes == SIZES else f"{name}, small"

    @property
    def cases(self) -> int:
        return len(self.ops) * len(self.sizes)


TARGETS = (
    Target(Topology.ONE_NODE, Transport.GRPC, (Op.ALL_GATHER, Op.REDUCE_SCATTER), 1.0),
    Target(Topology.ONE_NODE, Transport.GRPC, (Op.ALL_REDUCE,), 0.6),
    Target(Topology.ONE_NODE, Transport.SHM, COLLECTIVES, 5.0),
    Target(Topology.ONE_NODE, Transport.SHM, COLLECTIVES, 3.0, sizes=SMALL),
    Target(Topology.ONE_NODE, Transport.SHM, COLLECTIVES, 0.8, MEMCPY),
    Target(Topology.ONE_NODE, Transport.SHM, (Op.GATHER_ON_NODE,), 1.0, MEMCPY),
    Target(Topology.NETNS, Transport.GRPC, (Op.ALL_GATHER, Op.REDUCE_SCATTER), 1.3),
    Target(Topology.NETNS, Transport.GRPC, (Op.ALL_REDUCE,), 1.0),
    Target(Topology.NETNS, Transport.MTLS, COLLECTIVES, 0.7),
    Target(Topology.NETNS_1GBIT, Transport.HIER, COLLECTIVES, 1.8),
    Target(Topology.NETNS_1GBIT, Transport.HIER, COLLECTIVES, 0.95, LINK),
)


# Trainings that are compared with shardnet's, as they are called in rows.
FSDP2 = "fsdp2-gloo"
ALONE = "no communication"
COMPRESSED = {"int8": "shardnet int8", "bfloat16": "shardnet bfloat16"}  # by what weights are sent as; gradients as int8
STEPPING = "shardnet stepping in backward"


@dataclass(frozen=True, slots=True)
class StepTarget:
    """The least that the time of `peer` has to be, as a multiple of the time of `by`, at each number of ranks."""

    topology: Topology
    transport: Transport
    by: str
    peer: str
    ratio: float

    @property
    def name(self) -> str:
        return f"{self.peer} / {self.by}"


OURS = "shardnet"
STEP_TARGETS = (
    StepTarget(Topology.ONE_NODE, Transport.SHM, OURS, FSDP2, 1.5),
    StepTarget(Topology.ONE_NODE, Transport.SHM, OURS, ALONE, 1 / 1.15),
    StepTarget(Topology.NETNS_1GBIT, Transport.HIER, OURS, FSDP2, 1.5),
    *(StepTarget(Topology.NETNS_1GBIT, Transport.HIER, compressed, FSDP2, 3.0) for compressed in COMPRESSED.values()),
)
INTEROP_RATIO = (
    1.5  # of torch's own code over gloo to the same over shardnet, on one machine: of collectives the mean over SIZES, and each training
)
MEMORY_RATIO = 1 / 0.7  # of FSDP2's peak to shardnet's, on one machine through shared memory
STEP_BYTES = 100_000_000  # of parameters, from which on the targets count


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How one target fared at one number of ranks. `met` is None for a model that is too small to say."""

    target: StepTarget
    ranks: int
    ratio: float
    met: bool | None


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
    counting = [row for row in collectives(rows) if row.outstanding == 1]
    ranks = sorted({row.ranks for row in counting})
    return [outcome for count in ranks for target in TARGETS if (outcome := _judge(target, count, counting)) is not None]


def judge_steps(rows: Sequence[Row]) -> list[StepOutcome]:
    """One outcome a target and number of ranks for which both trainings were measured."""
    found = steps(rows)
    places = sorted({(row.ranks, row.bytes) for row in found})
    outcomes = []
    for target in STEP_TARGETS:
        for ranks, size in places:
            ratio = _step_ratio(target, [row for row in found if (row.ranks, row.bytes) == (ranks, size)])
            if ratio is not None:
                outcomes.append(StepOutcome(target, ranks, ratio, ratio >= target.ratio if size >= STEP_BYTES else None))
    return outcomes


def _step_ratio(target: StepTarget, rows: Sequence[Row]) -> float | None:
    here = [row for row in rows if (row.topology, row.transport) == (target.topology, target.transport)]
    times_ms = {row.peer: row.peer_ms for row in here}
    if here:
        times_ms[OURS] = here[0].ours_ms
    if target.by not in times_ms or target.peer not in times_ms:
        return None
    return times_ms[target.peer] / times_ms[target.by]


def _judge(target: Target, ranks: int, rows: Iterable[Row]) -> Outcome | None:
    place = (ranks, target.topology, target.transport)
    here = [row for row in rows if (row.ranks, row.topology, row.transport) == place and row.op in target.ops and row.bytes in target.sizes]
    ratios = {(row.op, row.bytes): ms / row.ours_ms for row in here if (ms := _peer_ms(target, row)) is not None}
    if not ratios:
        return None
    mean = geometric_mean(ratios.values())
    complete = len(ratios) == target.cases
    return Outcome(target, ranks, mean, len(ratios), mean >= target.ratio if complete else None)


def _peer_ms(target: Target, row: Row) -> float | None:
    return {MEMCPY: row.memcpy_ms, LINK: row.link_bound_ms}.get(target.peer, row.peer_ms)


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
