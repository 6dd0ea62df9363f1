"""`HttpPort`: which callers get an answer, which are told why not, and that nobody holds it up."""

import asyncio
import socket

import pytest

from shardnet.errors import AddressError, PlaintextRefused
from shardnet.transport import http_port
from shardnet.transport.http_port import HttpPort, Request, Response
from tests.http_calls import get, knock, say
from tests.shared_loop import on_shared_loop

HERE = "127.0.0.1:0"


async def echo(request: Request) -> Response:
    return Response(f"{request.path}?{request.query} {request.fields.get('accept')}".encode())


HELD: list["asyncio.Future[None]"] = []  # calls of /hold
WAITING = asyncio.Event()  # as many as are answered at once


async def hold(_: Request) -> Response:
    HELD.append(released := asyncio.get_running_loop().create_future())
    if len(HELD) == http_port._CALLERS:
        WAITING.set()
    await released
    return Response(b"")


async def fail(_: Request) -> Response:
    raise RuntimeError("a secret path")


def port(listen: str = HERE, *, insecure: bool = False, names: tuple[str, ...] | None = ("this-machine",)) -> HttpPort:
    routes = {"/echo": echo, "/fail": fail, "/hold": hold}
    return HttpPort(listen, routes, what="the echo", example="127.0.0.1:7", insecure=insecure, names=names, fields={"x-every": "answer"})


def address_of(opened: HttpPort) -> str:
    return str(opened.bound)


class Opened:
    """A port, open; nothing is left of it."""

    def __init__(self, opened: HttpPort) -> None:
        self.port = opened

    async def __aenter__(self) -> str:
        await self.port.start()
        return address_of(self.port)

    async def __aexit__(self, *_: object) -> None:
        await self.port.aclose()


@on_shared_loop
async def test_a_route_is_told_what_was_asked() -> None:
    async with Opened(port()) as address:
        answer = await get(address, "/echo?a=1&b=%2F", accept="text/x")
    assert (answer.status, answer.body) == (200, "/echo?a=1&b=%2F text/x")
    assert (answer.fields["x-every"], answer.fields["connection"]) == ("answer", "close")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/", 404), ("GET", "/echo/", 404), ("HEAD", "/echo", 405), ("POST", "/", 405)]
)
@on_shared_loop
async def test_what_is_not_there(method: str, path: str, status: int) -> None:
    async with Opened(port()) as address:
        answer = await get(address, path, method=method)
    assert (answer.status, answer.fields["x-every"]) == (status, "answer")
    assert ("allow" in answer.fields) is (status == 405)


@pytest.mark.parametrize(
    "said",
    [b"\x16\x03\x01\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\n", b"GET /echo\r\n\r\n", b"\r\n\r\n", b"GET /echo HTTP/1.1\r\nx: " + b"x" * 17_000],
)
@on_shared_loop
async def test_what_is_no_request(said: bytes) -> None:
    async with Opened(port()) as address:
        assert (await say(address, said)).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "10.0.0.1:7080", "[::1]", "[::1]:7080", "localhost:7080", "LOCALHOST", "this-machine:1"]
)
@on_shared_loop
async def test_who_means_this_port_is_answered(host: str) -> None:
    async with Opened(port()) as address:
        assert (await get(address, "/echo", host=host)).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7080", "127.0.0.1.evil.example", "localhost.evil.example:80", "::1", "a b", "7080", ":"]
)
@on_shared_loop
async def test_a_name_that_somebody_else_has_led_here_gets_nothing(host: str) -> None:
    async with Opened(port()) as address:
        answer = await get(address, "/echo", host=host)
    assert answer.status == 421
    assert (
        answer.body
        == "the host name in the request is not one of this server; use its IP address, or one of: 127.0.0.1, localhost, this-machine\n"
    )


@pytest.mark.parametrize("fields", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
@on_shared_loop
async def test_one_host_must_be_named(fields: bytes) -> None:
    async with Opened(port()) as address:
        assert (await say(address, b"GET /echo HTTP/1.1\r\n" + fields + b"\r\n")).startswith(b"HTTP/1.1 421 ")
    async with Opened(port(names=None)) as address:
        assert (await say(address, b"GET /echo HTTP/1.1\r\n" + fields + b"\r\n")).startswith(b"HTTP/1.1 200 ")


@on_shared_loop
async def test_the_name_that_it_listens_on_is_its_own() -> None:
    async with Opened(port("localhost:0")) as address:
        assert (await get(address.replace("localhost", "127.0.0.1"), "/echo", host="localhost")).status == 200


@on_shared_loop
async def test_a_route_that_fails_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    async with Opened(port()) as address:
        assert await say(address, b"GET /fail HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        assert (await get(address, "/echo")).status == 200
    assert "a secret path" in caplog.text
    caplog.clear()


async def test_who_says_nothing_is_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_port, "_CALL_S", 0.05)
    async with Opened(port()) as address:
        for said in (b"", b"GET /echo HT"):
            assert await say(address, said) == b""


async def test_more_callers_than_it_takes_wait_their_turn() -> None:
    async with Opened(port()) as address:
        held = [asyncio.create_task(get(address, "/hold")) for _ in range(http_port._CALLERS)]
        await WAITING.wait()
        waiting = asyncio.create_task(get(address, "/echo"))
        done, _ = await asyncio.wait({waiting}, timeout=0.2)
        assert not done
        HELD.pop().set_result(None)
        assert (await waiting).status == 200
        while HELD:
            HELD.pop().set_result(None)
        assert {(await each).status for each in held} == {200}


async def test_who_says_nothing_holds_up_nobody() -> None:
    """However many silent callers there are: the oldest of them makes room."""
    async with Opened(port()) as address:
        silent = [await knock(address) for _ in range(5 * http_port._CONNECTIONS)]
        for sock in silent[::2]:
            sock.send(b"GET /echo HTTP/1.1\r\nX: ")
        async with asyncio.timeout(2.0):  # they would have 5 s each
            assert (await get(address, "/echo")).status == 200
        for sock in silent:
            sock.close()


async def test_who_has_said_what_he_wants_is_not_sent_away() -> None:
    """Although many have come after it before anybody was accepted."""
    async with Opened(port()) as address:
        host, _, number = address.rpartition(":")
        first, caller, *others = (socket.create_connection((host, int(number))) for _ in range(2 + 2 * http_port._SILENT))
        caller.sendall(b"GET /echo HTTP/1.1\r\nHost: localhost\r\n\r\n")
        caller.setblocking(False)
        async with asyncio.timeout(2.0):
            assert (await asyncio.get_running_loop().sock_recv(caller, 65536)).startswith(b"HTTP/1.1 200 OK\r\n")
        for sock in (first, caller, *others):
            sock.close()


def test_where_it_may_listen() -> None:
    with pytest.raises(PlaintextRefused, match=r"the echo at 0\.0\.0\.0:7 would be open .* such as 127\.0\.0\.1:7, or allow it"):
        port("0.0.0.0:7")
    with pytest.raises(AddressError):
        port("nowhere")
    assert port("0.0.0.0:7", insecure=True).url == ""


async def test_a_port_that_is_taken_leaves_nothing_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        opened = port(f"127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(OSError, match="another process already listens there"):
            await opened.start()
        await opened.aclose()
