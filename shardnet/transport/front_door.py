"""`FrontDoor`: the one port of a process, through which all calls come.

It does the TLS, where there is any. So it knows who calls, and can log which callers it refused and why: grpcio does not log that
(github.com/grpc/grpc/issues/38665). A caller that begins with OPENING (http2/call.py) speaks our HTTP/2 and is served by it. The
bytes of all others are passed on to grpcio unchanged: the rendezvous' calls, health checks, statistics, tools, and mesh streams
that come through a proxy, which begins its connections in its own way.
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
from shardnet.transport.strangers import Strangers
from shardnet.transport.throttle import Throttle

log = logging.getLogger(__name__)

_RELAY_BYTES = 64 * 1024
_REST_S = 0.1  # before the next try after a connection could not be accepted
_STALL_S = 30.0  # in which a caller must take _RELAY_BYTES
_LINGER_S = 0.5
_LAST_WORDS_S = 0.2  # for grpcio's last bytes to reach its callers after it has closed; on a healthy loop this takes less than 1 ms
_TLS_ONLY = "this port accepts only TLS; give the calling process certificates (--certs) or the join token of the cluster (SHARDNET_TOKEN)"

Taker = Callable[[Connection], Awaitable[None]]  # owns the connection; OPENING was read from it


class FrontDoor:
    """Listening sockets and the connections that came through them; lives as long as the endpoint."""

    def __init__(self, sockets: list[socket.socket], admission: Admission, security: Security, take: Taker) -> None:
        """Takes ownership of the sockets, which are listening."""
        self._take = take
        self._admission = admission
        self._credentials = security.credentials
        self._refused, self._troubles = Throttle(log), Throttle(log)
        self._tasks = SocketTasks()
        self._strangers = Strangers()
        self._relays: set[asyncio.Task[Any]] = set()  # the tasks among them that pass bytes on
        self._listeners = [self._tasks.spawn(self._accept(sock), sock) for sock in sockets]

    def close_listeners(self) -> None:
        """Accept no more connections; existing ones stay."""
        for task in self._listeners:
            task.cancel()

    async def let_out(self) -> None:
        """Once grpcio has ended its calls: pass on its last bytes, such as the status of those calls."""
        if self._relays:
            await asyncio.wait(self._relays, timeout=_LAST_WORDS_S)

    async def aclose(self) -> None:
        """Close everything at once."""
        await self._tasks.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._strangers.make_room()
            try:
                sock, where = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors, or an error of that one connection (accept(2)): there will be others
                self._troubles.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(_REST_S)
                continue
            sock.setblocking(False)
            self._strangers.add(self._tasks.spawn(self._welcome(sock, f"{where[0]}:{where[1]}"), sock))
            await asyncio.sleep(0)  # sock_accept does not wait where others queue already: the loop would do nothing else

    async def _welcome(self, sock: socket.socket, caller: str) -> None:
        try:
            tune(sock)
            async with asyncio.timeout(HANDSHAKE_S):
                connection = await self._secure(sock)
                said = await _first_words(connection)
            self._strangers.forget(asyncio.current_task())
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
        """Make the connection; under TLS this also finds out who calls. Raises HandshakeError."""
        loop = asyncio.get_running_loop()
        if self._credentials is None:
            return PlainConnection(sock)
        first = await loop.sock_recv(sock, 1)
        if first and first != tls.FIRST_BYTE:
            with suppress(OSError):
                await loop.sock_sendall(sock, settings({}) + goaway(ErrorCode.INADEQUATE_SECURITY, _TLS_ONLY))
            raise HandshakeError(
                "it does not begin with TLS, which this port requires; give the caller certificates (--certs) or the join token"
            )
        return await tls.handshake(sock, self._credentials.accepting, accepting=True, said=first, step=self._strangers.step)


async def _first_words(connection: Connection) -> bytes:
    """Read from a caller until it is clear whether it sends OPENING; empty if it left without sending anything. Raises HandshakeError
    if it begins with TLS on a port without TLS."""
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
    """Give a caller time to read the reason. Closing a socket on which unread data arrives would reset it, and the reason would be lost."""
    with suppress(OSError):  # a timeout, too
        sock.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_LINGER_S):
            while await asyncio.get_running_loop().sock_recv(sock, _RELAY_BYTES):
                pass


async def _relay(said: bytes, caller: Connection, admission: Admission) -> None:
    """Pass bytes on, both ways, until grpcio has closed, which it soon does after a caller has closed.

    Then this ends, too, and also when a caller takes nothing for _STALL_S: otherwise a caller could hold the descriptors for ever.
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
    """Pass bytes on until `source` has ended, or `target` breaks or takes nothing for `stall_s`."""
    with suppress(OSError):
        while data := await source.receive(_RELAY_BYTES):
            async with asyncio.timeout(stall_s):
                await target.send_all(data)
    with suppress(OSError):
        target.finish()
