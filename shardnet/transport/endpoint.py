"""`Endpoint`: the one port on which a process answers everything that it is asked."""

import asyncio
import contextlib
import errno
import socket
from enum import Enum, auto
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security, check_plaintext
from shardnet.errors import ListenError, StateError
from shardnet.transport.options import server_options
from shardnet.transport.stats_service import Snapshot, stats_handlers

MAX_CALLS = 8192  # under way at once, far above what a cluster needs; a flood is refused rather than remembered


class _State(Enum):
    NEW = auto()  # services may be added; no port yet
    OPEN = auto()  # the port is bound and answers; CLOSED comes next
    CLOSED = auto()  # final


class Endpoint:
    """One listening port with health, statistics and the owner's services; lives as long as its process has that role.

    Everything runs on the event loop that calls `start`. `grpc.health.v1` answers NOT_SERVING until the owner says
    `set_serving(True)`.

    listen    address to listen on; port 0 lets the system choose, `address` then tells
    snapshot  gives the reply of `shardnet.v1.Stats`; called on the loop, must not block
    """

    def __init__(self, listen: str, *, limits: Limits, timeouts: Timeouts, snapshot: Snapshot, security: Security | None = None) -> None:
        """Raises AddressError or PlaintextRefused at once; opens nothing yet."""
        self._listen = Address.parse(listen)
        self._security = security or Security()
        check_plaintext(listen, insecure=self._security.insecure)
        self._options = server_options(timeouts, limits)
        self._drain_s = timeouts.drain_s
        self._handlers = [stats_handlers(snapshot)]
        self._health = health.aio.HealthServicer()
        self._state = _State.NEW
        self._server: grpc.aio.Server | None = None
        self._bound: Address | None = None

    def add(self, *handlers: grpc.GenericRpcHandler) -> None:
        """Add services; only before `start`."""
        if self._state is not _State.NEW:
            raise StateError(f"services must be added before the endpoint on {self._listen} starts")
        self._handlers.extend(handlers)

    @property
    def address(self) -> str:
        """`host:port` that was bound: the host as given, the port as chosen."""
        if self._bound is None:
            raise StateError(f"the endpoint on {self._listen} has no port before start()")
        return str(self._bound)

    async def start(self) -> None:
        """Bind and answer. Raises ListenError naming the address and what to do; nothing is left open then."""
        if self._state is not _State.NEW:
            raise StateError(f"the endpoint on {self._listen} was started before; make a new one")
        self._state = _State.CLOSED  # until everything below has worked
        await _check_free(self._listen)
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        server = grpc.aio.server(options=self._options, maximum_concurrent_rpcs=MAX_CALLS)
        server.add_generic_rpc_handlers(self._handlers)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        try:
            port = self._security.bind(server, str(self._listen))
        except RuntimeError as error:
            await server.stop(0)
            raise ListenError(f"cannot listen on {self._listen}: another process took it in this moment; try again") from error
        try:
            await server.start()
        except BaseException:
            await server.stop(0)
            raise
        self._server, self._bound, self._state = server, self._listen.with_port(port), _State.OPEN

    async def set_serving(self, serving: bool) -> None:
        """What `grpc.health.v1` answers from now on; watchers are told. Ignored once closing has begun."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def aclose(self, grace_s: float | None = None) -> None:
        """Refuse new calls, give those under way `grace_s` (default: drain_s) to end, then cut them. Safe to call twice.

        Cancelling it cuts at once.
        """
        server, self._server, self._state = self._server, None, _State.CLOSED
        if server is None:
            return
        grace_s = self._drain_s if grace_s is None else grace_s
        try:
            # a watcher that does not read its stream holds the servicer's lock: it must not hold up closing
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._health.enter_graceful_shutdown(), timeout=max(grace_s, 0.1))
            await server.stop(grace_s)
        except asyncio.CancelledError:
            await server.stop(0)
            raise

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


async def _check_free(address: Address) -> None:
    """Raise ListenError, with the reason and what to do, unless `address` can be bound. gRPC would only log the reason."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ListenError(f"cannot listen on {address}: the name is unknown here ({error.strerror}); use one of this machine") from error
    problems = [problem for family, _, _, _, where in found if (problem := _bind_problem(family, where)) is not None]
    in_use = [problem for problem in problems if problem.errno == errno.EADDRINUSE]
    # A name may have an IPv6 address on a machine without IPv6: one that can be bound is enough, unless somebody has the other.
    if in_use or len(problems) == len(found):
        problem = (in_use or problems)[0]
        raise ListenError(f"cannot listen on {address}: {_advice(problem)}") from problem


def _bind_problem(family: int, where: tuple[str | int | bytes, ...]) -> OSError | None:
    """Why one resolved address cannot be bound."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # With this option binding fails beside a listener but not beside another probe, so probes never harm each other.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return error
    return None


def _advice(error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return "another process listens there already; end it, choose another port, or give port 0 to let the system choose"
        case errno.EADDRNOTAVAIL:
            return "it is no address of this machine; use one of its own, or 0.0.0.0 for all of them"
        case errno.EACCES:
            return "this user may not open the port; choose one above 1023"
        case _:
            return f"{error.strerror}; choose another address"
