"""What `shardnet status` finds out: asked of a rendezvous and all its workers, or of one worker."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from shardnet.cli.services import read_progress
from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable, HandshakeError, ProtocolError
from shardnet.histogram import Histogram
from shardnet.pb import stats_pb2
from shardnet.rendezvous import client
from shardnet.rendezvous.events import JobStatus
from shardnet.telemetry import OpCounter, Progress
from shardnet.traffic import Traffic
from shardnet.transport.observe import health, snapshot
from shardnet.waiting import Absent

RENDEZVOUS = "rendezvous"  # the role that it gives itself
UNREACHABLE = "unreachable"  # the rendezvous counts it as a member, but it does not answer
UNTRUSTED = "not trusted"  # it, or who is at its address now, has no certificate that counts, or does not take ours
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


class Observer:
    """Asks, everyone at once; an answer that does not come in `timeout_s` is none."""

    def __init__(self, security: Security, timeout_s: float) -> None:
        self._security = security
        self._timeout_s = timeout_s

    async def look(self, address: str) -> ClusterView:
        """The process at `address` and all that it leads to. Raises EndpointUnavailable, HandshakeError or ProtocolError for it alone."""
        stats = await self._stats(address)
        state = await health(address, timeout_s=self._timeout_s, security=self._security)
        if stats.role != RENDEZVOUS:
            return ClusterView(address, state, stats)
        statuses = await client.status(address, timeout_s=self._timeout_s, security=self._security)
        return ClusterView(address, state, stats, tuple(await asyncio.gather(*map(self._job, statuses))))

    async def look_again(self, view: ClusterView) -> ClusterView:
        """The workers that were there at an earlier look, if the process that knew of them does not answer any more."""

        async def again(job: JobView) -> JobView:
            asked = await asyncio.gather(*(self._worker(each.rank, each.node, each.address) for each in job.workers if each.state != GONE))
            return replace(job, workers=(*asked, *(each for each in job.workers if each.state == GONE)))

        return replace(view, health=UNREACHABLE, jobs=tuple(await asyncio.gather(*map(again, view.jobs))))

    async def _job(self, status: JobStatus) -> JobView:
        members = await asyncio.gather(*(self._worker(member.rank, member.node, member.address) for member in status.members))
        workers = sorted([*members, *_gone(members)], key=lambda worker: worker.rank)
        return JobView(
            *(status.job, status.state, status.epoch, status.joined, status.min_world_size, status.max_world_size),
            workers=tuple(workers),
            absent=status.absent,
        )

    async def _worker(self, rank: int, node: str, address: str) -> WorkerView:
        try:
            stats, state = await asyncio.gather(self._stats(address), health(address, timeout_s=self._timeout_s, security=self._security))
        except HandshakeError:
            return WorkerView(rank, node, address, UNTRUSTED)
        except (EndpointUnavailable, ProtocolError):
            return WorkerView(rank, node, address, UNREACHABLE)
        return WorkerView(rank, node, address, state, stats)

    async def _stats(self, address: str) -> Stats:
        return read_stats(await snapshot(address, timeout_s=self._timeout_s, security=self._security))


def _gone(members: list[WorkerView]) -> list[WorkerView]:
    """The ranks that the survivors still know and the rendezvous does not."""
    known = next((member.stats.addresses for member in members if member.stats is not None), ())
    ranks = {member.rank for member in members}
    return [WorkerView(rank, "", address, GONE) for rank, address in enumerate(known) if rank not in ranks]


def read_stats(reply: stats_pb2.SnapshotReply) -> Stats:
    return Stats(
        role=reply.role,
        version=reply.version,
        uptime_s=reply.uptime_s,
        rank=reply.rank,
        world_size=reply.world_size,
        local_rank=reply.local_rank,
        epoch=reply.epoch,
        addresses=tuple(reply.addresses),
        step=reply.step,
        progress=read_progress(reply.progress),
        collectives={c.op: OpCounter(c.count, c.failed, c.bytes, c.seconds, c.waited_s, _histogram(c.counts)) for c in reply.collectives},
        bytes_sent=reply.bytes_sent,
        bytes_received=reply.bytes_received,
        stale_chunks=reply.stale_chunks,
        resident_bytes=reply.resident_bytes,
        memory_peers=tuple(reply.memory_peers),
        borrowers=tuple(reply.borrowers),
        routing=reply.routing,
        connections=reply.connections,
        waiting=tuple(Stuck(each.collective, each.seconds, tuple(map(_absent, each.absent))) for each in reply.waiting),
        late={each.rank: each.seconds for each in reply.late},
        nodes=tuple(reply.nodes),
        node_groups=tuple(reply.node_groups),
        epochs=reply.epochs,
        losses=reply.losses,
        bounds_s=tuple(reply.bounds_s),
        steps=Steps(_histogram(reply.steps.counts), reply.steps.seconds, reply.steps.exposed_s),
        exposed_s=reply.exposed_s,
        stalls=reply.stalls.count,
        stall_s=reply.stalls.seconds,
        peers={p.rank: Traffic(p.sent_network, p.sent_memory, p.received_network, p.received_memory) for p in reply.peers},
        link_bytes_per_s=reply.link_bytes_per_s,
        peak_resident_bytes=reply.memory.peak_resident,
        shared_bytes=reply.memory.shared,
        device_bytes=reply.memory.device_allocated,
        device_reserved_bytes=reply.memory.device_reserved,
        device_peak_bytes=reply.memory.device_peak,
        metrics=reply.metrics,
    )


def _histogram(counts: Sequence[int]) -> Histogram:
    """Empty where the process does not count them: another version."""
    return Histogram(list(counts)) if counts else Histogram()


def _absent(reply: stats_pb2.AbsentRank) -> Absent:
    return Absent(reply.rank, reply.address, reply.next_sequence if reply.HasField("next_sequence") else None, reply.last_entered)
