"""What is seen of a cluster: of each process what it says of itself, if it answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardnet.histogram import Histogram
from shardnet.telemetry import OpCounter, Progress
from shardnet.traffic import Traffic
from shardnet.waiting import Absent

RENDEZVOUS = "rendezvous"  # the role that it gives itself
UNREACHABLE = "unreachable"  # the rendezvous counts it as a member, but it does not answer
UNTRUSTED = "not trusted"  # it, or who is at its address now, has no certificate that counts, or does not take ours
LOST = "lost"  # a job's state: nobody is left, and they have not said that it was over
OVER = ("finished", LOST)
_KEPT = 8  # characters of the identity of a machine, where two have one name
GONE = "gone"  # it was given a rank and is no member any more


@dataclass(frozen=True, slots=True)
class Stuck:
    """A collective that waits for ranks for long, as one of those says that wait."""

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
    stale_chunks: int  # that came and were dropped
    resident_bytes: int
    memory_peers: tuple[int, ...]  # ranks to which it sends through shared memory
    borrowers: tuple[int, ...]  # those of them that read what it sends where it is, so that nothing is copied in between
    routing: str  # which way large collectives go, in words
    connections: str  # how they are protected, in words
    waiting: tuple[Stuck, ...]  # at most one for each group of ranks
    late: dict[int, float]  # seconds that it has waited for other ranks to enter collectives, by rank; in this epoch
    nodes: tuple[str, ...]  # names of machines, by node group
    node_groups: tuple[int, ...]  # by rank
    epochs: int  # that it has been a member of
    losses: int  # peers that it has lost, in all of them
    bounds_s: tuple[float, ...]  # of all histograms
    steps: Steps
    exposed_s: float  # for which training waited for communication, in all
    stalls: int  # collectives that others had not entered for long
    stall_s: float  # that these took
    peers: dict[int, Traffic]  # by rank, in this epoch
    link_bytes_per_s: float  # to the next rank; 0: nobody has measured it
    peak_resident_bytes: int
    shared_bytes: int  # part of what is resident
    device_bytes: int  # in tensors on CUDA devices
    device_reserved_bytes: int
    device_peak_bytes: int
    metrics: str  # where Prometheus can scrape it; empty: nowhere


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker: where it should be, and what it says, if it answers."""

    rank: int
    node: str  # empty if only the worker itself was asked: it does not say
    address: str
    state: str  # what its health says, or UNREACHABLE, UNTRUSTED or GONE
    stats: Stats | None = None

    @property
    def host(self) -> str:
        """Its machine's name, without what tells apart two of one name."""
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
    absent: int = 0  # members that have not come back since the rendezvous was started again


@dataclass(frozen=True, slots=True)
class ClusterView:
    """What the process at `address` says: of itself, and, if it is a rendezvous, of its jobs."""

    address: str
    health: str
    stats: Stats
    jobs: tuple[JobView, ...] = field(default=())


def short_nodes(names: Sequence[str]) -> list[str]:
    """Names of machines without the identities that make them long, or with as much of these as tells all apart."""
    for kept in (0, _KEPT):
        short = {name: _cut(name, kept) for name in names}
        if len({*short.values()}) == len(short):
            return [short[name] for name in names]
    return [*names]


def _cut(name: str, kept: int) -> str:
    host, _, identity = name.partition("/")
    return f"{host}/{identity[:kept]}" if kept and identity else host


def late_s(worker: WorkerView, workers: Iterable[WorkerView]) -> float | None:
    """How long the others have waited for it to enter collectives, as the one says that has waited longest; None if nobody says."""
    waited_s = [other.stats.late.get(worker.rank, 0.0) for other in workers if other is not worker and other.stats is not None]
    return max(waited_s, default=None)
