"""`DirectCalls`: the calls that this process serves over our own HTTP/2, without grpcio, because they are large or frequent."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc

from shardnet.config import Limits
from shardnet.credentials import Identity
from shardnet.errors import ProtocolError
from shardnet.transport.connection import Connection
from shardnet.transport.http2 import Call, CallBroken, Headers, Status
from shardnet.transport.options import HANDSHAKE_S

log = logging.getLogger(__name__)
LINGER_S = 1.0  # how long a call that was ended here waits for the peer to take the reason


@dataclass
class Refused(Exception):
    """The caller gets no answer, or no further one."""

    code: grpc.StatusCode
    why: str

    @property
    def status(self) -> Status:
        return Status(self.code, self.why)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, from where, and what it says about itself."""

    address: str
    identity: Identity | None  # None in plaintext
    metadata: Headers


# Serves a call to its end, including its status. Raises Refused, CallBroken or ProtocolError.
Serve = Callable[[Call, Caller], Awaitable[None]]


class DirectCalls:
    """Knows which function serves which method; lives as long as its endpoint. Runs on one loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._served: dict[str, Serve] = {}

    def add(self, path: str, serve: Serve) -> None:
        """Serve a method; `path` as in gRPC: /package.Service/Method."""
        self._served[path] = serve

    async def take(self, connection: Connection) -> None:
        """Serve the one call of a connection, from which OPENING was read. Owns the connection."""
        call = Call(connection, self._limits)
        call.answer()
        try:
            try:
                await self._serve(call, connection)
            except Refused as refusal:
                call.send_status(refusal.status)
            await call.linger(LINGER_S)
        except (CallBroken, ProtocolError, OSError) as error:
            log.debug("a call ended: %s", error)  # the function that serves it has seen the error
        finally:
            call.close()

    async def _serve(self, call: Call, connection: Connection) -> None:
        async with asyncio.timeout(HANDSHAKE_S):
            metadata = await call.headers()
        path = dict(metadata).get(":path", "")
        if (serve := self._served.get(path)) is None:
            raise Refused(
                grpc.StatusCode.UNIMPLEMENTED, f"a connection that begins in this way can only call {' or '.join(self._served)}, not {path}"
            )
        await serve(call, Caller(str(connection.socket.getpeername()), connection.identity, metadata))
