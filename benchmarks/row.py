"""`Row`: one comparison, as it is written to JSON and read by whoever follows the project's speed."""

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.plan import Topology, Transport


@dataclass(frozen=True, slots=True)
class Timing:
    """How long one engine took.

    wall_s  of each run, from the first rank's start to the last one's result
    cpu_s   of one run on average, all threads of all ranks together
    """

    wall_s: tuple[float, ...]
    cpu_s: float

    def quartiles_ms(self) -> tuple[float, float, float]:
        """Lower quartile, median, upper quartile."""
        times_ms = sorted(1e3 * seconds for seconds in self.wall_s)
        if len(times_ms) == 1:
            return times_ms[0], times_ms[0], times_ms[0]
        low, median, high = statistics.quantiles(times_ms, n=4, method="inclusive")
        return low, median, high


@dataclass(frozen=True, slots=True)
class Row:
    """Two engines at one task.

    kind         "collective", "step", "memory": a step of each engine in processes of its own, "interop": torch's own code over
                 process groups of both, or "growth": a collective or a step of those that show how cost grows
    op           which collective, or "train_step"; for torch's own code "ddp_step" or "fsdp2_step"
    topology     where the ranks are: "one-node" is all on one machine, "netns" each in a network namespace, "netns-1gbit" on two
                 nodes (namespaces) with links of 1 Gbit/s
    nodes        over how many the ranks are spread, evenly
    transport    what carried shardnet's data, as benchmarks/plan.py has it: "grpc", "grpc-mtls", "shm" or "hier"
    bytes        collective: the full tensor on a rank (gathered for all_gather, unreduced otherwise); step: all parameters
    ours_ms      median; q1 and q3 are the quartiles. Each run counts from the first rank's start to the last one's result
    ratio        peer_ms / ours_ms: above 1 shardnet is ahead
    *_cpu_s      of one run, all ranks together
    moved_bytes  what a ring sends in one run, all ranks together: the same amount for both, to compare CPU time by
    chunk_bytes  shardnet's
    outstanding  collective: how many were started before the first one was waited for; times are for all of them
    layers       step: blocks of the model
    *_peak_bytes memory: the most that all ranks' processes had together; memory that several share counts once
    memcpy_ms    collective, where ranks share memory: how long a copy of `bytes`, or for an all_reduce two, takes all ranks at once
    copies_ms    the same: how long it takes all ranks at once to copy and add what they must, if nobody waits for anybody (copies.py)
    free_ms      step of torch's own code: the same over a process group that moves nothing
    explained_ms collective, with --explain: where a run's time went, by part (explain.py)
    *_loss       step: mean training loss over ranks at the last step, where the peer trains the same
    """

    kind: str
    op: str
    topology: str
    transport: str
    ranks: int
    bytes: int
    repeats: int
    ours_ms: float
    ours_q1_ms: float
    ours_q3_ms: float
    ours_cpu_s: float
    peer: str
    peer_ms: float
    peer_q1_ms: float
    peer_q3_ms: float
    peer_cpu_s: float
    ratio: float
    moved_bytes: int
    chunk_bytes: int
    nodes: int = 1
    outstanding: int = 1
    layers: int | None = None
    ours_peak_bytes: int | None = None
    peer_peak_bytes: int | None = None
    memcpy_ms: float | None = None
    copies_ms: float | None = None
    free_ms: float | None = None
    explained_ms: dict[str, float] | None = None
    ours_loss: float | None = None
    peer_loss: float | None = None
    machine: str = ""
    measured_at: str = ""

    @classmethod
    def compare(cls, ours: Timing, theirs: Timing, **facts: Any) -> Self:
        """The row for two timings of the same task; `facts` are the remaining fields."""
        ours_q1, ours_ms, ours_q3 = ours.quartiles_ms()
        peer_q1, peer_ms, peer_q3 = theirs.quartiles_ms()
        return cls(
            repeats=len(ours.wall_s),
            ours_ms=ours_ms,
            ours_q1_ms=ours_q1,
            ours_q3_ms=ours_q3,
            ours_cpu_s=ours.cpu_s,
            peer_ms=peer_ms,
            peer_q1_ms=peer_q1,
            peer_q3_ms=peer_q3,
            peer_cpu_s=theirs.cpu_s,
            ratio=peer_ms / ours_ms,
            **facts,
        )

    @property
    def link_bound_ms(self) -> float | None:
        """The least time in which the nodes' links can carry what must cross them; None if they have no limit.

        A node must receive once what it lacks: (n - 1) / n of a tensor over n nodes, as often as a ring sends a tensor.
        """
        bytes_per_s = Topology(self.topology).link_bytes_per_s
        if bytes_per_s is None:
            return None
        ring_bytes = self.moved_bytes / (self.ranks - 1)
        return 1e3 * ring_bytes * (self.nodes - 1) / self.nodes / bytes_per_s

    def stamped(self, machine: str, measured_at: str) -> Self:
        return dataclasses.replace(self, machine=machine, measured_at=measured_at)

    def to_dict(self) -> dict[str, object]:
        """The fields; those that do not apply to this kind are left out."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Raises TypeError if fields are missing or unknown, ValueError for a place that no table has."""
        row = cls(**fields)
        if Transport(row.transport) not in Topology(row.topology).transports:
            raise ValueError(f"nothing is measured over {row.transport} on {row.topology}")
        return row


def collectives(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "collective"]


def steps(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "step"]


def interops(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "interop"]


def growths(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "growth"]


def memories(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind == "memory"]
