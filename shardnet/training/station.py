"""`Station`: where a process joins its cluster from, epoch after epoch."""

import asyncio
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Protocol

from shardnet.backend.base import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.backend.hybrid_backend import with_engine
from shardnet.backend.loopback import LoopbackBackend
from shardnet.backend.torch_source import check_engine
from shardnet.credentials import Security
from shardnet.errors import JoinRefused, PeerLost
from shardnet.loop import LoopThread
from shardnet.pb import stats_pb2
from shardnet.rendezvous.backoff import delays
from shardnet.rendezvous.client import Membership, join
from shardnet.rendezvous.identity import new_incarnation, node_identity
from shardnet.rendezvous.refusal import Refusal
from shardnet.rendezvous.request import JoinRequest
from shardnet.settings import Settings
from shardnet.telemetry import Telemetry
from shardnet.topology import Member, Topology
from shardnet.training.last_words import LastWords
from shardnet.training.seat import Seat, begin_membership, end_membership
from shardnet.training.snapshot import worker_snapshot
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.metrics_port import MetricsPort
from shardnet.transport.stats_service import Snapshot
from shardnet.transport.store_service import StoreService

log = logging.getLogger(__name__)
Meet = Callable[[str, str], Awaitable[Topology]]  # gives everybody's topology, for this worker's address and its certificate's identity
_left = set[tuple[str, str]]()  # rendezvous and job of the worlds that this process has been in
_within = ContextVar[AbstractSet[tuple[str, str]]]("within", default=frozenset())  # the same, of the worlds that this task is in
_LEAVING_S = 0.3  # at most, between tries to join again while others have not left yet
_PAUSE_S = 2.0  # at most, between tries to form an elastic world: a worker may die in each, and a network may be down for a while


class Station(Protocol):
    """What outlives the epochs of one process's membership."""

    elastic: bool  # whether an epoch may follow another one

    async def join(self, after: Membership | None = None, missing: Collection[int] = ()) -> Seat:
        """Take a place in the next epoch. `after` is the membership that this one follows; it is ended in any case. `missing` are ranks
        of its epoch that nobody need wait for.

        Raises a RendezvousError if joining fails, and PeerLost if a peer cannot be reached.
        """


@asynccontextmanager
async def open_station(
    settings: Settings, meet: Meet | None = None, store: StoreService | None = None, *, security: Security | None = None
) -> AsyncIterator[Station]:
    """Listen on a port, closed at the end, which also serves a store if one is given; or, without a rendezvous, be a world of one. With
    `meet` workers find each other by calling that, once, and no rendezvous is asked. `security` is for a caller that also connects itself,
    and must be the same worker then: with a token, `settings.security()` is a new identity each time.

    Raises UsageError for an engine inside nodes that this process cannot have.
    """
    check_engine(settings.node_engine)
    if not settings.local_rank:  # one of the workers on this machine is enough
        for name, meant in Settings.misspelt(os.environ):
            log.warning("nothing reads the environment variable %s; did you mean %s?", name, meant)
    if not settings.rendezvous:
        alone = _Alone(settings)
        async with _metrics(settings, alone):
            yield alone
        return
    station = _Connected(settings, await settings.listen_address(), meet, store, security or settings.security())
    async with _metrics(settings, station), _on_loop(station.endpoint):
        before = _within.get()
        try:
            yield station
        finally:
            _within.set(before)
            if station.was_member:
                _left.add((settings.rendezvous, settings.job))


async def take_seat(station: Station, settings: Settings) -> Seat:
    """Take a place in the world. A process that has left the job before may come back before others have left it: it waits for them."""
    gives_up_s = time.monotonic() + settings.timeouts.join_s
    for pause_s in delays(most_s=_LEAVING_S):
        try:
            seat = await station.join()
            _within.set({*_within.get(), (settings.rendezvous, settings.job)})
            return seat
        except JoinRefused as refusal:
            is_ours = (settings.rendezvous, settings.job) in _left - _within.get() and refusal.reason in (Refusal.RUNNING, Refusal.FULL)
            if not is_ours or time.monotonic() >= gives_up_s:
                raise
        await asyncio.sleep(pause_s)
    raise AssertionError("unreachable: delays() does not end")


@asynccontextmanager
async def _metrics(settings: Settings, station: "_Alone | _Connected") -> AsyncIterator[None]:
    """Serve statistics if the settings ask for it. In a world of one there is no other port."""
    if not settings.metrics:
        yield
        return
    port = MetricsPort(settings.metrics_address, station.snapshot, insecure=settings.insecure)
    async with _on_loop(port):
        station.metrics = port.url
        yield


class _Port(Protocol):
    async def start(self) -> None:
        """Listen."""

    async def aclose(self) -> None:
        """Stop, whether or not it listens."""


@asynccontextmanager
async def _on_loop(port: _Port) -> AsyncIterator[None]:
    """Run a port on the loop thread, from another loop."""
    loop = LoopThread.shared()
    try:
        await loop.run_here(port.start())
        yield
    finally:
        await loop.run_here(port.aclose())


class _Alone:
    """No network, the same API."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seat: Seat | None = None
        self.elastic = False
        self.metrics = ""

    async def join(self, after: Membership | None = None, missing: Collection[int] = ()) -> Seat:
        world = LoopbackBackend.create_group(1, timeouts=self._settings.timeouts, limits=self._settings.limits)[0]
        backend = await with_engine(world, self._settings.node_engine, self._settings.local_rank)
        backend.telemetry.tracing = bool(self._settings.trace)
        backend.telemetry.begin_epoch()
        member = Member(0, 0, 0, "127.0.0.1:0", node_identity(self._settings.node), new_incarnation())
        self._seat = Seat(backend, Topology(epoch=1, rank=0, members=(member,)))
        return self._seat

    def snapshot(self) -> stats_pb2.SnapshotReply:
        seat = self._seat
        reply = worker_snapshot(Telemetry(), None) if seat is None else worker_snapshot(seat.backend.telemetry, seat.topology)
        reply.serving, reply.metrics = seat is not None, self.metrics
        return reply


class _Obituaries:
    """Passes on what the rendezvous says of members of one epoch that are gone to the mesh of that epoch. On the loop thread.

    These are only hints: the rendezvous may have lost a worker whose peers still reach it. The mesh checks by itself, but earlier because
    of the hint.
    """

    def __init__(self) -> None:
        self._mesh: GrpcMesh | None = None
        self._gone: dict[int, str] = {}  # heard of before there was a mesh

    def lead_to(self, mesh: GrpcMesh) -> None:
        self._mesh = mesh
        for rank, reason in self._gone.items():
            mesh.suspect(rank, reason)

    def add(self, rank: int, reason: str, left: bool) -> None:
        if self._mesh is None:
            self._gone[rank] = reason
        else:
            self._mesh.suspect(rank, reason)
            log.info("%s the rendezvous says that rank %d is gone (%s)", self._mesh.where, rank, reason)


class _Connected:
    """A port on which the peers of all epochs reach this process."""

    def __init__(self, settings: Settings, listen: str, meet: Meet | None, store: StoreService | None, security: Security) -> None:
        self._settings = settings
        self._meet = meet
        self.elastic = settings.elastic
        self._security = security
        self._telemetry = Telemetry(tracing=bool(settings.trace))
        self._topology: Topology | None = None  # of the newest epoch
        self._mesh: GrpcMesh | None = None  # of the newest epoch that was formed
        self.metrics = ""
        self._service = MeshService(settings.timeouts)
        self.endpoint = Endpoint(
            listen,
            limits=settings.limits,
            timeouts=settings.timeouts,
            snapshot=self._snapshot,
            security=self._security,
            leases=meet is not None,
            reflection=settings.reflection,
        )
        self.endpoint.add_mesh(self._service)
        if store is not None:
            self.endpoint.add(store.handlers)

    @property
    def snapshot(self) -> Snapshot:
        return self.endpoint.snapshot

    @property
    def was_member(self) -> bool:
        return self._topology is not None

    def _snapshot(self) -> stats_pb2.SnapshotReply:
        reply = worker_snapshot(self._telemetry, self._topology)
        reply.metrics = self.metrics
        return reply

    async def join(self, after: Membership | None = None, missing: Collection[int] = ()) -> Seat:
        seat = await self._take_seat(after, tuple(missing))
        try:
            await LoopThread.shared().run_here(self._serve())
            self._tell_launcher(seat.topology)
        except BaseException as error:
            await seat.leave(LastWords.of(error))
            raise
        return seat

    async def _serve(self) -> None:
        """Report that the world is whole, unless it is no longer so."""
        assert self._mesh is not None
        self.endpoint.set_serving(self._mesh.is_whole)

    def _tell_launcher(self, topology: Topology) -> None:
        if not self._settings.report_file:
            return
        try:
            with Path(self._settings.report_file).open("a") as report:
                report.write(f"{topology.me.address} {topology.rank} {topology.world_size}\n")
        except OSError as error:  # the launcher then shows less, and that is all
            log.warning("cannot report rank %d to the launcher: %s: %s", topology.rank, self._settings.report_file, error.strerror)

    async def _take_seat(self, after: Membership | None, missing: tuple[int, ...]) -> Seat:
        if self._meet is not None:
            return await self._take_arranged_seat(self._meet)
        gives_up_s = math.inf  # of time.monotonic
        for pause_s in delays(most_s=_PAUSE_S):
            obituaries = _Obituaries()
            membership = await self._become_member(after, missing, obituaries)
            self._topology = topology = membership.topology
            if after is None:
                _compare_rank(self._settings.wished_rank, topology)
            try:
                return Seat(await self._connect(topology, obituaries), topology, membership)
            except PeerLost as error:
                gives_up_s = min(gives_up_s, time.monotonic() + self._settings.timeouts.join_s)
                if not self.elastic or time.monotonic() >= gives_up_s:
                    await end_membership(membership, goodbye=False, words=LastWords.of(error))
                    raise
                log.warning("%s; trying again with the workers that are left", error)
                after, missing = membership, ()
            except BaseException as error:
                await end_membership(membership, goodbye=False, words=LastWords.of(error))
                raise
            try:
                await asyncio.sleep(pause_s)
            except BaseException:
                await end_membership(membership, goodbye=False)
                raise
        raise AssertionError("unreachable: delays() does not end")

    async def _take_arranged_seat(self, meet: Meet) -> Seat:
        credentials = self._security.credentials
        address = await self._settings.public_address(self.endpoint.address)
        self._topology = topology = await meet(address, "" if credentials is None else credentials.identity.uri)
        return Seat(await self._connect(topology, _Obituaries()), topology)

    async def _become_member(self, after: Membership | None, missing: tuple[int, ...], obituaries: _Obituaries) -> Membership:
        settings = self._settings
        try:
            request = JoinRequest(
                job=settings.job,
                incarnation=new_incarnation(),
                address=await settings.public_address(self.endpoint.address),
                node=node_identity(settings.node),
                min_world_size=settings.min_world_size,
                max_world_size=settings.max_world_size,
                local_rank_hint=settings.local_rank,
                wished_rank=None if settings.wished_rank < 0 else settings.wished_rank,
                elastic=self.elastic,
                previous="" if after is None else after.topology.me.incarnation,
                last_epoch=0 if after is None else after.topology.epoch,
                missing=missing,
                replacement=settings.replacement,
            )
            if after is not None:
                after.supersede()
            membership = join(settings.rendezvous, request, timeouts=settings.timeouts, on_lost=obituaries.add, security=self._security)
            await begin_membership(membership)
        finally:
            if after is not None:  # not earlier: the rendezvous must see that this worker goes on, not that it is gone
                await end_membership(after, goodbye=False)
        return membership

    async def _connect(self, topology: Topology, obituaries: _Obituaries) -> Backend:
        settings = self._settings
        mesh = self._mesh = GrpcMesh(
            *(settings.job, topology, self._service, self._security, settings.timeouts, settings.limits),
            shared_memory=settings.shared_memory,
            terms={"routing": settings.routing, "node_engine": settings.node_engine},
            on_broken=lambda: self.endpoint.set_serving(False),
            watched=self._meet is not None,
        )
        LoopThread.shared().call(obituaries.lead_to, mesh)
        backend = await ClusterBackend.start(
            mesh, topology, timeouts=settings.timeouts, limits=settings.limits, routing=settings.routing, telemetry=self._telemetry
        )
        return await with_engine(backend, settings.node_engine, topology.me.local_rank)


def _compare_rank(wished: int, topology: Topology) -> None:
    """Log if this worker has another rank than it asked for. A warning only on one worker of each node: if the reason is the order of
    nodes, the first worker's rank differs, too."""
    if wished in (-1, topology.rank):
        return
    log.log(
        logging.WARNING if topology.me.local_rank == 0 else logging.INFO,
        "[rank %d/%d epoch %d] this worker asked for rank %d, but got another one: the job had workers before, or not every worker "
        "asked for a different rank, or ranks of a node would not be consecutive; take the rank from cluster.rank, not the environment",
        *(topology.rank, topology.world_size, topology.epoch, wished),
    )
