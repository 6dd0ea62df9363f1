"""What shardnet wants to reach, and whether a run did."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.plan import COLLECTIVES, Op, Topology, Transport
from benchmarks.row import Row, collectives, steps
from shardnet.config import KIB, MIB

SIZES = (MIB, 16 * MIB, 64 * MIB)
SMALL = (KIB, 64 * KIB)  # here it is latency that is measured
UNITS = (16 * MIB, 64 * MIB)  # units that FSDP gathers; those of the GPT whose steps are measured have 12 MiB
_NAMES = {SIZES: "", SMALL: ", small", UNITS: ", of a unit"}
GLOO = "gloo"
MEMCPY = "memcpy"
LINK = "link's bound"
COPIES = "copies alone"
OURS = "shardnet"


@dataclass(frozen=True, slots=True)
class Target:
    """`ratio` is the least geometric mean of `peer`'s time / shardnet's, over `ops` and `sizes`, that will do at each number of ranks."""

    topology: Topology
    transport: Transport
    ops: tuple[Op, ...]
    ratio: float
    peer: str = GLOO
    sizes: tuple[int, ...] = SIZES

    @property
    def name(self) -> str:
        return " + ".join(self.ops) + ("" if self.peer == GLOO else f" ({self.peer} / shardnet)") + _NAMES[self.sizes]

    @property
    def cases(self) -> int:
        return len(self.ops) * len(self.sizes)


TARGETS = (
    Target(Topology.ONE_NODE, Transport.GRPC, (Op.ALL_GATHER, Op.REDUCE_SCATTER), 1.0),
    Target(Topology.ONE_NODE, Transport.GRPC, (Op.ALL_REDUCE,), 0.6),
    Target(Topology.ONE_NODE, Transport.SHM, COLLECTIVES, 5.0),
    Target(Topology.ONE_NODE, Transport.SHM, COLLECTIVES, 3.0, sizes=SMALL),
    Target(Topology.ONE_NODE, Transport.SHM, COLLECTIVES, 0.8, MEMCPY),
    Target(Topology.ONE_NODE, Transport.SHM, (Op.GATHER_ON_NODE,), 1.0, MEMCPY, UNITS),
    Target(Topology.NETNS, Transport.GRPC, (Op.ALL_GATHER, Op.REDUCE_SCATTER), 1.3),
    Target(Topology.NETNS, Transport.GRPC, (Op.ALL_REDUCE,), 1.0),
    Target(Topology.NETNS, Transport.MTLS, COLLECTIVES, 0.7),
    Target(Topology.NETNS_1GBIT, Transport.HIER, COLLECTIVES, 1.8),
    Target(Topology.NETNS_1GBIT, Transport.HIER, COLLECTIVES, 0.95, LINK),
)


# Trainings that are compared with shardnet's, by their names in rows.
FSDP2 = "fsdp2-gloo"
ALONE = "no communication"
COMPRESSED = {"int8": "shardnet int8", "bfloat16": "shardnet bfloat16"}  # by the format of the weights that are sent; gradients as int8
STEPPING = "shardnet stepping in backward"


@dataclass(frozen=True, slots=True)
class StepTarget:
    """`ratio` is the least value of `peer`'s time / `by`'s time that will do at each number of ranks."""

    topology: Topology
    transport: Transport
    by: str
    peer: str
    ratio: float

    @property
    def name(self) -> str:
        return f"{self.peer} / {self.by}"


STEP_TARGETS = (
    StepTarget(Topology.ONE_NODE, Transport.SHM, OURS, FSDP2, 1.5),
    StepTarget(Topology.ONE_NODE, Transport.SHM, OURS, ALONE, 1 / 1.15),
    StepTarget(Topology.NETNS_1GBIT, Transport.HIER, OURS, FSDP2, 1.5),
    *(StepTarget(Topology.NETNS_1GBIT, Transport.HIER, compressed, FSDP2, 3.0) for compressed in COMPRESSED.values()),
)
INTEROP_RATIO = (
    1.5  # time of torch's own code over gloo / over shardnet, on one machine: for collectives as the mean over SIZES, and for each training
)
MEMORY_RATIO = 1 / 0.7  # FSDP2's peak / shardnet's, on one machine through shared memory
STEP_BYTES = 100_000_000  # of parameters; the targets count from this size on


@dataclass(frozen=True, slots=True)
class Limit:
    """The ratio that would result if shardnet took no longer than something else that was measured in the same run."""

    ratio: float
    if_: str


NO_WAITING = "if no rank waited for another"
FULL_LINK = "at the link's bound"
NO_COMMUNICATION = "if communication took no time"


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How one target fared at one number of ranks. `met` is None for a model that is too small to say."""

    target: StepTarget
    ranks: int
    ratio: float
    met: bool | None
    limit: Limit | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one target fared at one number of ranks. `met` is None where not all of its ops and sizes were measured."""

    target: Target
    ranks: int
    mean: float
    cases: int
    met: bool | None
    limit: Limit | None = None


def judge(rows: Sequence[Row]) -> list[Outcome]:
    """One outcome for each target and number of ranks for which anything was measured."""
    counting = [row for row in collectives(rows) if row.outstanding == 1]
    ranks = sorted({row.ranks for row in counting})
    return [outcome for count in ranks for target in TARGETS if (outcome := _judge(target, count, counting)) is not None]


def judge_steps(rows: Sequence[Row]) -> list[StepOutcome]:
    """One outcome for each target and number of ranks for which both trainings were measured."""
    found = steps(rows)
    places = sorted({(row.ranks, row.bytes) for row in found})
    outcomes = []
    for target in STEP_TARGETS:
        for ranks, size in places:
            times_ms = _step_times_ms(target, [row for row in found if (row.ranks, row.bytes) == (ranks, size)])
            if target.by in times_ms and target.peer in times_ms:
                ratio = times_ms[target.peer] / times_ms[target.by]
                limit = Limit(times_ms[target.peer] / times_ms[ALONE], NO_COMMUNICATION) if ALONE in times_ms else None
                outcomes.append(StepOutcome(target, ranks, ratio, ratio >= target.ratio if size >= STEP_BYTES else None, limit))
    return outcomes


def _step_times_ms(target: StepTarget, rows: Sequence[Row]) -> dict[str, float]:
    """Step times of all trainings on the target's topology and transport, by name."""
    here = [row for row in rows if (row.topology, row.transport) == (target.topology, target.transport)]
    return {row.peer: row.peer_ms for row in here} | ({OURS: here[0].ours_ms} if here else {})


def _judge(target: Target, ranks: int, rows: Iterable[Row]) -> Outcome | None:
    place = (ranks, target.topology, target.transport)
    here = [row for row in rows if (row.ranks, row.topology, row.transport) == place and row.op in target.ops and row.bytes in target.sizes]
    ratios = _ratios(here, target.peer, OURS)
    if not ratios:
        return None
    mean = geometric_mean(ratios.values())
    complete = len(ratios) == target.cases
    return Outcome(target, ranks, mean, len(ratios), mean >= target.ratio if complete else None, _limit(target, here))


def _limit(target: Target, rows: Sequence[Row]) -> Limit | None:
    for bound, if_ in ((LINK, FULL_LINK), (COPIES, NO_WAITING)):
        ratios = _ratios(rows, target.peer, bound)
        if bound != target.peer and len(ratios) == target.cases:
            return Limit(geometric_mean(ratios.values()), if_)
    return None


def _ratios(rows: Iterable[Row], peer: str, by: str) -> dict[tuple[str, int], float]:
    """`peer`'s time / `by`'s time, by case, where both are known."""
    times_ms = {(row.op, row.bytes): (_time_ms(row, peer), _time_ms(row, by)) for row in rows}
    return {case: peer_ms / by_ms for case, (peer_ms, by_ms) in times_ms.items() if peer_ms is not None and by_ms is not None}


def _time_ms(row: Row, of: str) -> float | None:
    return {OURS: row.ours_ms, MEMCPY: row.memcpy_ms, COPIES: row.copies_ms, LINK: row.link_bound_ms}.get(of, row.peer_ms)


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms))
