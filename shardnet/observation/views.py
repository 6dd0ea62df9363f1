"""What an observer sees of a cluster: for each process the statistics that it gives about itself, if it answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardnet.histogram import Histogram
from shardnet.telemetry import OpCounter, Progress
from shardnet.traffic import Traffic
from shardnet.waiting import Absent

RENDEZVOUS = "rendezvous"  # its role in its own statistics
UNREACHABLE = "unreachable"  # the rendezvous counts it as a member, but it does not answer
UNTRUSTED = "not trusted"  # it, or the process at its address now, has no valid certificate, or does not accept ours
LOST = "lost"  # a job's state: no worker is left, and none has said that the training was over
OVER = ("finished", LOST)
_KEPT = 8  # characters of a machine's identity, if two machines have the same name
GONE = "gone"  # it was given a rank but is no longer a member


@dataclass(frozen=True, slots=True)
class Stuck:
    """A collective that has waited for ranks for long, as one of the waiting ranks reports it."""

    collective: str
    seconds: float
    absent: tuple[Absent, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps whose time is known."""

    times: Histogram
    seconds: float
    exposed_s: float  # of these the training thread waited for communication


@dataclass(frozen=True, slots=True)
class Stats:
    """The snapshot of one process."""

    role: str
    version: str
    uptime_s: float
    rank: int
    world_size: int
    local_rank: int
    epoch: int
    addresses: tuple[str, ...]  # by rank
    step: int
    progress: Progress
    collectives: dict[str, OpCounter]
    bytes_sent: int
    bytes_received: int
    stale_chunks: int  # chunks that came too late and were dropped
    resident_bytes: int
    memory_peers: tuple[int, ...]  # ranks to which it sends through shared memory
    borrowers: tuple[int, ...]  # those of them that read data directly from its memory, without a copy in between
    routing: str  # which way large collectives go, in words
    connections: str  # how they are protected, in words
    waiting: tuple[Stuck, ...]  # at most one for each group of ranks
    late: dict[int, float]  # seconds for which it has waited for other ranks to enter collectives, by rank; in this epoch
    nodes: tuple[str, ...]  # names of machines, by node group
    node_groups: tuple[int, ...]  # by rank
    epochs: int  # of which it has been a member
    losses: int  # peers that it has lost, in all epochs
    bounds_s: tuple[float, ...]  # of all histograms
    steps: Steps
    exposed_s: float  # for which training waited for communication, in total
    stalls: int  # collectives that others had not entered for long
    stall_s: float  # the time that these took
    peers: dict[int, Traffic]  # by rank, in this epoch
    link_bytes_per_s: float  # to the next rank; 0: not measured
    peak_resident_bytes: int
    shared_bytes: int  # part of the resident bytes
    device_bytes: int  # in tensors on CUDA devices
    device_reserved_bytes: int
    device_peak_bytes: int
    metrics: str  # the URL where Prometheus can scrape it; empty: nowhere

    @property
    def wait_share(self) -> float | None:
        """The part of its steps' time in which the training thread waited for communication; None if no waiting was measured.

        Only FSDP and ZeroOptimizer measure how long they wait. Where they have never waited, collectives that the program awaits itself
        may have taken any time, so the share is unknown and not 0, unless the program reports one.
        """
        if self.exposed_s and self.steps.seconds:
            return self.steps.exposed_s / self.steps.seconds
        return self.progress.exposed_share or None


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker: where it should be, and its statistics, if it answers."""

    rank: int
    node: str  # empty if only the worker itself was asked, because it does not know
    address: str
    state: str  # its health, or UNREACHABLE, UNTRUSTED or GONE
    stats: Stats | None = None

    @property
    def host(self) -> str:
        """Its machine's name, without the suffix that distinguishes machines of the same name."""
        return self.node.partition("/")[0]


@dataclass(frozen=True, slots=True)
class JobView:
    job: str
    state: str
    epoch: int
    joined: int
    min_world_size: int
    max_world_size: int
    workers: tuple[WorkerView, ...] = ()
    absent: int = 0  # members that have no connection to the rendezvous now, and may come back
    first_lost: str = ""  # which member was lost first, in the last epoch that lost one, and why

    @property
    def waiting(self) -> int:
        """The workers without a rank, while others have one."""
        members = sum(worker.state != GONE for worker in self.workers)
        return max(0, self.joined - members) if members else 0

    @property
    def headcount(self) -> str:
        """For example `2 of 1 to 4 workers`: those with a rank, or, before anybody has one, those that have joined."""
        least, most = self.min_world_size, self.max_world_size
        return f"{self.joined - self.waiting} of {most if least == most else f'{least} to {most}'} workers"


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the process at `address` says about itself, and, if it is a rendezvous, about its jobs."""

    address: str
    health: str
    stats: Stats
    jobs: tuple[JobView, ...] = field(default=())


def short_nodes(names: Sequence[str]) -> list[str]:
    """Names of machines without their long identities, or with as much of these as makes all names different."""
    for kept in (0, _KEPT):
        short = {name: _cut(name, kept) for name in names}
        if len({*short.values()}) == len(short):
            return [short[name] for name in names]
    return [*names]


def _cut(name: str, kept: int) -> str:
    host, _, identity = name.partition("/")
    return f"{host}/{identity[:kept]}" if kept and identity else host


def late_s(worker: WorkerView, workers: Iterable[WorkerView]) -> float | None:
    """How long the others have waited for it to enter collectives, according to the one that has waited longest; None if unknown."""
    waited_s = [other.stats.late.get(worker.rank, 0.0) for other in workers if other is not worker and other.stats is not None]
    return max(waited_s, default=None)
