"""`MetricsPort`: statistics by HTTP, for Prometheus and what reads its text.

Not the library's own server: that has a thread for each caller, takes any number, and waits for each for ever.

A port of its own: scrapers speak HTTP/1.1, and know nothing of a cluster's certificates. What it tells is the training's business,
and whoever calls is told. So it is on loopback, where an agent of the machine scrapes, or anywhere by explicit choice.
"""

import asyncio
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.parser import BytesHeaderParser
from http import HTTPStatus
from types import TracebackType
from typing import Self

from shardnet.address import Address
from shardnet.credentials.security import check_plaintext
from shardnet.errors import PlaintextRefused, UsageError
from shardnet.transport.listening import listening_sockets
from shardnet.transport.socket_tasks import SocketTasks
from shardnet.transport.stats_service import Snapshot

log = logging.getLogger(__name__)

PATH = "/metrics"
_CALLERS = 8  # at once; more wait their turn
_CALL_S = 5.0  # for a whole call: a scraper takes milliseconds
_HEAD_BYTES = 16 * 1024  # of a request; a scraper's has less than one
_REST_S = 0.1  # before the next try where a connection cannot be had
_FIELDS = BytesHeaderParser()


class MetricsPort:
    """`GET /metrics`, and nothing else; one answer a connection. An async context manager that lives as long as its process has its role.

    Everything runs on the loop that enters it, but for the making of the text, which takes milliseconds.
    """

    def __init__(self, listen: str, snapshot: Snapshot, *, insecure: bool = False) -> None:
        """Raises AddressError, PlaintextRefused, or UsageError where the library is not installed; opens nothing yet."""
        self._listen = Address.parse(listen)
        _check(self._listen, insecure)
        try:
            from shardnet.transport.metrics import render
        except ImportError as error:
            raise UsageError(
                "metrics need the package prometheus_client: install shardnet[metrics], or leave them off (--metrics, SHARDNET_METRICS, "
                "connect(metrics=...)); shardnet.v1.Stats and `shardnet status` say the same"
            ) from error
        self._render = render
        self._snapshot = snapshot
        self._turns = asyncio.Semaphore(_CALLERS)
        self._tasks = SocketTasks()
        self._bound: Address | None = None
        self._writer: ThreadPoolExecutor | None = None  # makes the text; owned

    @property
    def url(self) -> str:
        """Where to scrape; empty before it is open."""
        return "" if self._bound is None else f"http://{self._bound}{PATH}"

    async def start(self) -> None:
        """Bind and answer. Raises ListenError; nothing is left open then."""
        sockets = await listening_sockets(self._listen)
        self._bound = self._listen.with_port(sockets[0].getsockname()[1])
        self._writer = ThreadPoolExecutor(1, "shardnet-metrics")
        for sock in sockets:
            self._tasks.spawn(self._accept(sock), sock)
        log.info("metrics at %s", self.url)

    async def aclose(self) -> None:
        """Close everything at once. Safe to call twice, or without a start."""
        await self._tasks.cancel()
        if self._writer is not None:
            self._writer.shutdown(wait=False)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._turns.acquire()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptors, or an error of that one connection (accept(2)): there will be others
                self._turns.release()
                await asyncio.sleep(_REST_S)
                continue
            sock.setblocking(False)
            self._tasks.spawn(self._serve(sock), sock).add_done_callback(lambda _: self._turns.release())

    async def _serve(self, sock: socket.socket) -> None:
        try:
            with suppress(OSError):  # a timeout, too
                async with asyncio.timeout(_CALL_S):
                    await asyncio.get_running_loop().sock_sendall(sock, await self._answer(await _head(sock)))
                    await _linger(sock)
        except Exception:
            log.exception("answering a scraper failed")

    async def _answer(self, head: bytes) -> bytes:
        line, _, fields = head.partition(b"\r\n")
        match line.split(b" "):
            case [b"GET", target, version] if version.startswith(b"HTTP/1."):
                if target.partition(b"?")[0] != PATH.encode():
                    return _response(HTTPStatus.NOT_FOUND, f"there is only {PATH} here\n".encode())
            case [_, _, version] if version.startswith(b"HTTP/1."):
                return _response(HTTPStatus.METHOD_NOT_ALLOWED, b"only GET is answered\n", allow="GET")
            case _:
                return _response(HTTPStatus.BAD_REQUEST, b"this is no request of HTTP/1\n")
        accept = str(_FIELDS.parsebytes(fields).get("accept", ""))
        assert self._writer is not None
        text, kind = await asyncio.get_running_loop().run_in_executor(self._writer, self._render, self._snapshot(), accept)
        return _response(HTTPStatus.OK, text, kind)


def _check(address: Address, insecure: bool) -> None:
    try:
        check_plaintext(str(address), insecure=insecure)
    except PlaintextRefused:
        raise PlaintextRefused(
            f"metrics at {address} would be open to everybody who reaches that address, for they are served without encryption, whatever "
            "certificates there are; give a loopback address such as 127.0.0.1:9464 and scrape it from this machine, or allow it with "
            "insecure=True (--insecure) on a network that you trust"
        ) from None


async def _head(sock: socket.socket) -> bytes:
    """What a caller says up to the blank line, or as much of it as is too much. Raises OSError."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
        more = await asyncio.get_running_loop().sock_recv(sock, _HEAD_BYTES)
        if not more:
            raise ConnectionResetError
        head += more
    return head.partition(b"\r\n\r\n")[0] if b"\r\n\r\n" in head else b""


async def _linger(sock: socket.socket) -> None:
    """Until the caller has closed: closing a socket on which something arrives unread would take the answer back."""
    sock.shutdown(socket.SHUT_WR)
    while await asyncio.get_running_loop().sock_recv(sock, _HEAD_BYTES):
        pass


def _response(status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", **fields: str) -> bytes:
    fields = {"content-type": kind, "content-length": str(len(body)), "connection": "close", **fields}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{head}\r\n".encode("ascii") + body
