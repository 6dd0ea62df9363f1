"""`FrontDoor`: the one port of a process, through which everything comes that it is asked.

It does the TLS, where there is any, and so knows who calls, and says who was turned away and why: grpcio tells nobody
(github.com/grpc/grpc/issues/38665). A caller that begins with OPENING (http2/call.py) speaks our HTTP/2 and gets it. All
others are passed on to grpcio, byte for byte: the rendezvous' calls, health checks, statistics, tools, and mesh streams
that come through a proxy, whose connections begin in its own way.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from shardnet.credentials import Security
from shardnet.errors import HandshakeError
from shardnet.transport import tls
from shardnet.transport.admission import Admission
from shardnet.transport.connection import Connection, PlainConnection, tune
from shardnet.transport.http2 import OPENING
from shardnet.transport.http2.frames import ErrorCode, goaway, settings
from shardnet.transport.options import HANDSHAKE_S
from shardnet.transport.socket_tasks import SocketTasks
from shardnet.transport.throttle import Throttle

log = logging.getLogger(__name__)

_RELAY_BYTES = 64 * 1024
_REST_S = 0.1  # before the next try where a connection cannot be had
_STALL_S = 30.0  # in which a caller must take what _RELAY_BYTES hold
_LINGER_S = 0.5
_LAST_WORDS_S = 0.2  # in which what grpcio has said before it closed gets to its callers; on a loop that is well they take less than 1 ms
_TLS_ONLY = "this port takes TLS only; give this process certificates (--certs) or the join token of the cluster (SHARDNET_TOKEN)"

Taker = Callable[[Connection], Awaitable[None]]  # owns the connection; OPENING was read from it


class FrontDoor:
    """Listening sockets and the connections that came through them; lives as long as the endpoint."""

    def __init__(self, sockets: list[socket.socket], admission: Admission, security: Security, take: Taker) -> None:
        """Takes over the sockets, which listen."""
        self._take = take
        self._admission = admission
        self._credentials = security.credentials
        self._refused, self._troubles = Throttle(log), Throttle(log)
        self._tasks = SocketTasks()
        self._relays: set[asyncio.Task[Any]] = set()  # those of them that pass bytes on
        self._listeners = [self._tasks.spawn(self._accept(sock), sock) for sock in sockets]

    def close_listeners(self) -> None:
        """Let nobody in any more; who is in stays."""
        for task in self._listeners:
            task.cancel()

    async def let_out(self) -> None:
        """Once grpcio has ended its calls: pass on the last of what it has said, such as how they ended."""
        if self._relays:
            await asyncio.wait(self._relays, timeout=_LAST_WORDS_S)

    async def aclose(self) -> None:
        """Close everything at once."""
        await self._tasks.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, where = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors, or an error of that one connection (accept(2)): there will be others
                self._troubles.warning("cannot take a connection: %s", error.strerror)
                await asyncio.sleep(_REST_S)
                continue
            sock.setblocking(False)
            self._tasks.spawn(self._welcome(sock, f"{where[0]}:{where[1]}"), sock)

    async def _welcome(self, sock: socket.socket, caller: str) -> None:
        try:
            tune(sock)
            async with asyncio.timeout(HANDSHAKE_S):
                connection = await self._secure(sock)
                said = await _first_words(connection)
            if said == OPENING:
                await self._take(connection)
            elif said:
                await self._relay(said, connection)
        except HandshakeError as error:
            self._refused.warning("refused a connection from %s: %s", caller, error)
            await _linger(sock)
        except OSError:  # a timeout, too
            return
        except Exception:
            log.exception("serving a connection failed")

    async def _relay(self, said: bytes, connection: Connection) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._relays.add(task)
        try:
            await _relay(said, connection, self._admission)
        finally:
            self._relays.discard(task)

    async def _secure(self, sock: socket.socket) -> Connection:
        """The connection, with its caller known if that is wanted. Raises HandshakeError."""
        loop = asyncio.get_running_loop()
        if self._credentials is None:
            return PlainConnection(sock)
        first = await loop.sock_recv(sock, 1)
        if first and first != tls.FIRST_BYTE:
            with suppress(OSError):
                await loop.sock_sendall(sock, settings({}) + goaway(ErrorCode.INADEQUATE_SECURITY, _TLS_ONLY))
            raise HandshakeError("it does not begin with TLS, which this port demands")
        return await tls.handshake(sock, self._credentials.accepting, accepting=True, said=first)


async def _first_words(connection: Connection) -> bytes:
    """What a caller says until it is clear whether it is OPENING; empty if it left without a word. Raises HandshakeError for TLS
    where there is none."""
    said = b""
    while said != OPENING and OPENING.startswith(said):
        more = await connection.receive(len(OPENING) - len(said) if said else 1)
        if not more:
            break
        said += more
    if said == tls.FIRST_BYTE:
        with suppress(OSError):
            await connection.send_all(tls.NO_TLS)
        raise HandshakeError("it begins with TLS, but this process has no certificates (--certs) and no join token (SHARDNET_TOKEN)")
    return said


async def _linger(sock: socket.socket) -> None:
    """Give a caller time to read why. Closing a socket on which something arrives unread would take it back."""
    with suppress(OSError):  # a timeout, too
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_LINGER_S):
            while await asyncio.get_running_loop().sock_recv(sock, _RELAY_BYTES):
                pass


async def _relay(said: bytes, caller: Connection, admission: Admission) -> None:
    """Pass bytes on, both ways, until grpcio has closed, as it does soon where a caller has.

    A caller that stays then, or does not take what it asked for, would hold the descriptors for as long as it likes.
    """
    loop = asyncio.get_running_loop()
    async with admission.visit(caller.identity) as sock:
        server = PlainConnection(sock)
        await server.send_all(said)
        asking = loop.create_task(_pump(caller, server, None))
        try:
            await _pump(server, caller, _STALL_S)
        finally:
            asking.cancel()
            await asyncio.wait({asking})


async def _pump(source: Connection, target: Connection, stall_s: float | None) -> None:
    """Until `source` has ended, or `target` breaks or takes nothing for `stall_s`."""
    with suppress(OSError):
        while data := await source.receive(_RELAY_BYTES):
            async with asyncio.timeout(stall_s):
                await target.send_all(data)
    with suppress(OSError):
        target.finish()
