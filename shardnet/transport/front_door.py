"""`FrontDoor`: the one port of a worker, behind which two servers live.

A caller that begins with OPENING (http2/call.py) speaks our HTTP/2 and gets it. All others are passed on to grpcio, byte for
byte: health checks, statistics, tools, and mesh streams that come through a proxy, whose connections begin in its own way.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from shardnet.transport.http2 import OPENING
from shardnet.transport.options import HANDSHAKE_S

log = logging.getLogger(__name__)

_RELAY_BYTES = 64 * 1024
_REST_S = 0.1  # before the next try where a connection cannot be had
_STALL_S = 30.0  # in which a caller must take what _RELAY_BYTES hold

Taker = Callable[[socket.socket], Awaitable[None]]  # owns the socket; OPENING was read from it
Behind = str | tuple[str, int]  # where grpcio listens: a Unix socket, or a TCP address


class FrontDoor:
    """Listening sockets and the connections that came through them; lives as long as the endpoint."""

    def __init__(self, sockets: list[socket.socket], take: Taker, behind: Behind) -> None:
        """Takes over the sockets, which listen."""
        self._take = take
        self._behind = behind
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners = [self._spawn(self._accept(sock), sock) for sock in sockets]

    def close_listeners(self) -> None:
        """Let nobody in any more; who is in stays."""
        for task in self._listeners:
            task.cancel()

    async def aclose(self) -> None:
        """Close everything at once."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, coroutine: Coroutine[Any, Any, None], sock: socket.socket) -> "asyncio.Task[None]":
        """A task with its socket, which is closed behind it even if the task is cancelled before it has begun."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: sock.close())
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors, or an error of that one connection (accept(2)): there will be others
                log.warning("cannot take a connection: %s", error.strerror)
                await asyncio.sleep(_REST_S)
                continue
            sock.setblocking(False)
            self._spawn(self._welcome(sock), sock)

    async def _welcome(self, sock: socket.socket) -> None:
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(HANDSHAKE_S):
                said = await _first_words(sock)
            if said == OPENING:
                await self._take(sock)
            elif said:
                await _relay(said, sock, self._behind)
        except OSError:  # a timeout, too
            return
        except Exception:
            log.exception("serving a connection failed")


async def _first_words(sock: socket.socket) -> bytes:
    """What a caller says until it is clear whether it is OPENING; empty if it left without a word."""
    loop, said = asyncio.get_running_loop(), b""
    while said != OPENING and OPENING.startswith(said):
        more = await loop.sock_recv(sock, len(OPENING) - len(said))
        if not more:
            break
        said += more
    return said


async def _relay(said: bytes, caller: socket.socket, behind: Behind) -> None:
    """Pass bytes on, both ways, until grpcio has closed, as it does soon where a caller has.

    A caller that stays then, or does not take what it asked for, would hold the descriptors for as long as it likes.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX if isinstance(behind, str) else socket.AF_INET) as server:
        server.setblocking(False)
        await loop.sock_connect(server, behind)
        await loop.sock_sendall(server, said)
        asking = loop.create_task(_pump(caller, server, None))
        try:
            await _pump(server, caller, _STALL_S)
        finally:
            asking.cancel()
            await asyncio.wait({asking})


async def _pump(source: socket.socket, target: socket.socket, stall_s: float | None) -> None:
    """Until `source` has ended, or `target` breaks or takes nothing for `stall_s`."""
    loop = asyncio.get_running_loop()
    with suppress(OSError):
        while data := await loop.sock_recv(source, _RELAY_BYTES):
            async with asyncio.timeout(stall_s):
                await loop.sock_sendall(target, data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
