"""`Endpoint`: the one port on which a process answers all calls."""

import asyncio
from enum import Enum, auto
from types import TracebackType
from typing import Self

import grpc

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import StateError
from shardnet.pb import stats_pb2
from shardnet.transport import stats_service
from shardnet.transport.admission import Admission
from shardnet.transport.direct import DirectCalls
from shardnet.transport.front_door import FrontDoor
from shardnet.transport.health_service import HealthService
from shardnet.transport.listening import listening_sockets
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.options import server_options
from shardnet.transport.outbox import PUSH
from shardnet.transport.reflection_service import reflection_handlers
from shardnet.transport.stats_service import Snapshot, StatsService

MAX_CALLS = 8192  # under way at once, far above what a cluster needs; further calls are refused instead of using memory


class _State(Enum):
    NEW = auto()  # services may be added; no port yet
    OPEN = auto()  # the port is bound and answers; CLOSED comes next
    CLOSED = auto()  # final


class Endpoint:
    """One listening port with health, statistics and the owner's services; lives as long as its process has that role.

    Everything runs on the event loop that calls `start`. `grpc.health.v1` answers NOT_SERVING until the owner says
    `set_serving(True)`.

    listen      address to listen on; with port 0 the system chooses, and `address` tells the port
    snapshot    returns the reply of `shardnet.v1.Stats`; called on the loop, must not block
    leases      whether an open call means that its caller lives, so that its failure must be noticed at once; see `server_options`
    reflection  whether callers may ask which services there are, and what their messages look like
    """

    def __init__(
        self,
        listen: str,
        *,
        limits: Limits,
        timeouts: Timeouts,
        snapshot: Snapshot,
        security: Security | None = None,
        leases: bool = False,
        reflection: bool = False,
    ) -> None:
        """Opens nothing yet. Raises AddressError, PlaintextRefused, or UsageError if reflection is wanted but not installed."""
        self._listen = Address.parse(listen)
        self._security = security or Security()
        self._security.check(listen)
        self._options = server_options(timeouts, limits, leases=leases)
        self._drain_s = timeouts.drain_s
        self._snapshot = snapshot
        self._health = HealthService()
        self._stats = StatsService(self.snapshot)
        self._handlers = [self._health.handlers, self._stats.handlers]
        if reflection:
            self._handlers.append(reflection_handlers(self._services))
        self._state = _State.NEW
        self._server: grpc.aio.Server | None = None
        self._bound: Address | None = None
        self._direct = DirectCalls(limits)
        self._direct.add(stats_service.PATH, self._stats.serve)
        self._door: FrontDoor | None = None

    def add_mesh(self, service: MeshService) -> None:
        """Take the streams of peers; only before `start`."""
        self.add(service.handlers)
        self._direct.add(PUSH, service.serve)

    def add(self, *handlers: grpc.GenericRpcHandler) -> None:
        """Add services; only before `start`."""
        if self._state is not _State.NEW:
            raise StateError(f"services must be added before the endpoint on {self._listen} starts")
        self._handlers.extend(handlers)

    def _services(self) -> frozenset[str]:
        """The names of all services."""
        return frozenset(handlers.service_name() for handlers in self._handlers if isinstance(handlers, grpc.ServiceRpcHandler))

    @property
    def address(self) -> str:
        """The bound `host:port`: the host as given, the port as chosen."""
        if self._bound is None:
            raise StateError(f"the endpoint on {self._listen} has no port before start()")
        return str(self._bound)

    async def start(self) -> None:
        """Bind and answer. Raises ListenError naming the address and what to do, and leaves nothing open then."""
        if self._state is not _State.NEW:
            raise StateError(f"the endpoint on {self._listen} was started before; make a new one")
        self._state = _State.CLOSED  # until everything below has worked
        self._health.services = self._services()
        admission = Admission()
        server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=MAX_CALLS, interceptors=[admission])
        server.add_generic_rpc_handlers(self._handlers)
        try:
            port = await self._bind(server, admission)
            await _start(server)
        except BaseException:
            try:
                await server.stop(0)
            finally:
                await self._close_door()
            raise
        self._server, self._bound, self._state = server, self._listen.with_port(port), _State.OPEN

    async def _bind(self, server: grpc.aio.Server, admission: Admission) -> int:
        """Give the port to a front door, and grpcio a private address behind it."""
        sockets = await listening_sockets(self._listen)  # first: if this failed later, grpcio would keep what it has bound
        try:
            admission.bind(server)
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        self._door = FrontDoor(sockets, admission, self._security, self._direct.take)
        port: int = sockets[0].getsockname()[1]
        return port

    async def _close_door(self) -> None:
        if self._door is not None:
            await self._door.aclose()

    def set_serving(self, serving: bool) -> None:
        """Set what `grpc.health.v1` answers from now on, and tell watchers. On the loop. Ignored once closing has begun."""
        self._health.set(serving)

    def snapshot(self) -> stats_pb2.SnapshotReply:
        """What `shardnet.v1.Stats` answers now. On the loop."""
        reply = self._snapshot()
        reply.connections, reply.serving = str(self._security), self._health.is_serving
        return reply

    async def aclose(self, grace_s: float | None = None) -> None:
        """Refuse new calls, give those under way `grace_s` (default: drain_s) to end, then cut them; watchers' calls end at once. Safe to
        call twice.

        Cancelling it cuts all calls at once.
        """
        server, self._server, self._state = self._server, None, _State.CLOSED
        if server is None:
            return
        grace_s = self._drain_s if grace_s is None else grace_s
        if self._door is not None:
            self._door.close_listeners()
        self._health.close()
        self._stats.close()
        try:
            await server.stop(grace_s)
            if self._door is not None:
                await self._door.let_out()
        except asyncio.CancelledError:
            await server.stop(0)
            raise
        finally:
            await self._close_door()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


async def _start(server: grpc.aio.Server) -> None:
    """Start the server; cancelling this waits until it has started. grpcio's own start must not be cancelled: after that its server
    cannot be stopped any more."""
    starting = asyncio.ensure_future(server.start())
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await asyncio.wait({starting})
        raise
