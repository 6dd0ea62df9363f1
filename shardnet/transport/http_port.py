"""`HttpPort`: a few answers by HTTP/1, for clients that speak nothing else: Prometheus and browsers.

It does not use the server of Python's library, which has a thread for each caller, takes any number of them, and waits for each for ever.
It is a port of its own, because its callers know nothing about a cluster's certificates. So it is plaintext, whatever certificates there
are, and everybody who calls gets an answer: therefore it is on loopback, or elsewhere only by explicit choice.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.message import Message
from email.parser import BytesHeaderParser
from functools import partial
from http import HTTPStatus

from shardnet.address import Address
from shardnet.credentials.security import check_plaintext
from shardnet.errors import AddressError, PlaintextRefused
from shardnet.transport.listening import listening_sockets
from shardnet.transport.socket_tasks import SocketTasks

log = logging.getLogger(__name__)

_CALLERS = 16  # that are answered at once; more wait their turn
_SILENT = 16  # connections without a request yet (a browser opens some in advance); one more, and the oldest is closed
_CONNECTIONS = 64  # in total
_CALL_S = 5.0  # for a whole call, which normally takes milliseconds
_HEAD_BYTES = 16 * 1024  # the longest head of a request; a browser's has one or two KiB
_REST_S = 0.1  # before the next try after a connection could not be accepted
_FIELDS = BytesHeaderParser()


@dataclass(frozen=True, slots=True)
class Request:
    """A GET. `query` is the part after the question mark, as it was sent."""

    path: str
    query: str
    fields: Message


@dataclass(frozen=True, slots=True)
class Response:
    body: bytes
    kind: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    fields: Mapping[str, str] = field(default_factory=dict)  # in addition to those that every answer has


Route = Callable[[Request], Awaitable[Response]]  # if it raises, the error is logged, and the caller gets no answer


class HttpPort:
    """Answers `GET` of some paths and nothing else, one per connection. Lives from `start` to `aclose`, on the loop that starts it."""

    def __init__(
        self,
        listen: str,
        routes: Mapping[str, Route],
        *,
        what: str,
        example: str,
        insecure: bool = False,
        names: Collection[str] | None = None,
        fields: Mapping[str, str] | None = None,
    ) -> None:
        """what, example  what is served, and an address at which it could be served, for messages
        insecure  it may be served to other machines
        names     host names by which it may be called, in addition to localhost and IP addresses; None: any name. With names given, a
                  stranger's web page whose name leads here (DNS rebinding) gets nothing
        fields    header fields that every answer has

        Raises AddressError or PlaintextRefused; opens nothing yet.
        """
        self._listen = Address.parse(listen)
        _check(self._listen, insecure, what, example)
        self._routes = routes
        self._names = None if names is None else {"localhost", self._listen.host, *(name.lower() for name in names)}
        self._fields = fields or {}
        self._room = asyncio.Semaphore(_CONNECTIONS)
        self._turns = asyncio.Semaphore(_CALLERS)
        self._tasks = SocketTasks()
        self._silent: dict[socket.socket, asyncio.Task[None]] = {}  # the oldest first
        self.bound: Address | None = None  # with its real port; None before it is open

    @property
    def url(self) -> str:
        """The port's URL without a path; empty before it is open."""
        return "" if self.bound is None else f"http://{self.bound}"

    async def start(self) -> None:
        """Bind and answer. Raises ListenError, and leaves nothing open then."""
        sockets = await listening_sockets(self._listen)
        self.bound = self._listen.with_port(sockets[0].getsockname()[1])
        for sock in sockets:
            self._tasks.spawn(self._accept(sock), sock)

    async def aclose(self) -> None:
        """Close everything at once. Safe to call twice, or without a start."""
        await self._tasks.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._room.acquire()
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # no descriptors, or an error of that one connection (accept(2)): there will be others
                self._room.release()
                await asyncio.sleep(_REST_S)
                continue
            sock.setblocking(False)
            self._silent[sock] = task = self._tasks.spawn(self._serve(sock), sock)
            task.add_done_callback(partial(self._end, sock))
            if len(self._silent) > _SILENT:
                self._silent.pop(next(iter(self._silent))).cancel()
            await asyncio.sleep(0)  # read what came with this connection before the next one is taken, which may close this one

    def _end(self, sock: socket.socket, _: "asyncio.Task[None]") -> None:
        self._silent.pop(sock, None)
        self._room.release()

    async def _serve(self, sock: socket.socket) -> None:
        try:
            with suppress(OSError):  # a timeout, too
                async with asyncio.timeout(_CALL_S):
                    head = await _head(sock)
                    self._silent.pop(sock, None)
                    async with self._turns:
                        response = await self._answer(head)
                        await asyncio.get_running_loop().sock_sendall(sock, _as_bytes(response, self._fields))
                    await _linger(sock)
        except Exception:
            log.exception("answering a caller of %s failed", self.url)

    async def _answer(self, head: bytes) -> Response:
        line, _, rest = head.partition(b"\r\n")
        match line.split(b" "):
            case [method, target, version] if version.startswith(b"HTTP/1."):
                path, _, query = target.decode("latin-1").partition("?")
            case _:
                return _refusal(HTTPStatus.BAD_REQUEST, "this is not an HTTP/1 request")
        fields = _FIELDS.parsebytes(rest)
        if not self._is_meant(fields.get_all("host", [])):
            known = ", ".join(sorted(self._names or ()))
            return _refusal(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"the host name in the request is not one of this server; use its IP address, or one of: {known}",
            )
        route = self._routes.get(path)
        if method != b"GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "only GET requests are answered", allow="GET")
        if route is None:
            return _refusal(HTTPStatus.NOT_FOUND, f"this server has only {', '.join(self._routes)}")
        return await route(Request(path, query, fields))

    def _is_meant(self, hosts: list[str]) -> bool:
        """Whether the caller meant this port: it called by an IP address, which is no stranger's name, or by one of the port's names."""
        if self._names is None:
            return True
        if len(hosts) != 1:
            return False
        named = str(hosts[0]).strip()
        try:
            called = Address.parse(named if named.rpartition(":")[2].isdecimal() and not named.endswith("]") else f"{named}:80")
        except AddressError:
            return False
        return called.is_literal or called.host in self._names


def _check(address: Address, insecure: bool, what: str, example: str) -> None:
    try:
        check_plaintext(str(address), insecure=insecure)
    except PlaintextRefused:
        raise PlaintextRefused(
            f"{what} at {address} would be open to everybody who reaches that address, because this port uses no encryption and no "
            f"certificates; give a loopback address such as {example}"
        ) from None


async def _head(sock: socket.socket) -> bytes:
    """Read what a caller sends up to the blank line; returns nothing if that is too long. Raises OSError."""
    head = b""
    while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
        more = await asyncio.get_running_loop().sock_recv(sock, _HEAD_BYTES)
        if not more:
            raise ConnectionResetError
        head += more
    return head.partition(b"\r\n\r\n")[0] if b"\r\n\r\n" in head else b""


async def _linger(sock: socket.socket) -> None:
    """Wait until the caller has closed: closing a socket on which unread data arrives would reset it, and the answer would be lost."""
    sock.shutdown(socket.SHUT_WR)
    while await asyncio.get_running_loop().sock_recv(sock, _HEAD_BYTES):
        pass


def _refusal(status: HTTPStatus, why: str, **fields: str) -> Response:
    return Response(f"{why}\n".encode(), status=status, fields=fields)


def _as_bytes(response: Response, fields: Mapping[str, str]) -> bytes:
    own = {"content-type": response.kind, "content-length": str(len(response.body)), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in {**own, **fields, **response.fields}.items())
    return f"HTTP/1.1 {response.status.value} {response.status.phrase}\r\n{head}\r\n".encode("ascii") + response.body
