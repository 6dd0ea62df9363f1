"""One port with two servers: a caller's first bytes decide which one it gets."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import grpc
import psutil
import pytest

from shardnet.address import Address
from shardnet.config import MIB, Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import ListenError
from shardnet.pb import stats_pb2
from shardnet.transport import listening, strangers
from shardnet.transport.admission import Admission
from shardnet.transport.connection import Connection, PlainConnection
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.front_door import FrontDoor, _relay
from shardnet.transport.http2 import OPENING, Call, Status
from shardnet.transport.listening import listening_sockets
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.observe import Health, health, snapshot
from shardnet.transport.strangers import Strangers
from shardnet.transport.watching import watch
from tests.credentials.made import security
from tests.shared_loop import on_shared_loop
from tests.transport.handshakes import BRIEF_S, be_impatient
from tests.transport.http2.test_call import sockets

TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits()
REPLY = stats_pb2.SnapshotReply(role="worker", step=3)


@asynccontextmanager
async def worker(listen: str = "127.0.0.1:0") -> AsyncIterator[Endpoint]:
    endpoint = Endpoint(listen, limits=LIMITS, timeouts=TIMEOUTS, snapshot=lambda: REPLY, security=Security(insecure=True))
    endpoint.add_mesh(MeshService(TIMEOUTS))
    async with endpoint:
        yield endpoint


async def connect(endpoint: Endpoint) -> socket.socket:
    host, _, port = endpoint.address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return sock


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0", "0.0.0.0:0", "[::]:0"])
@on_shared_loop
async def test_grpcio_answers_through_it(listen: str) -> None:
    async with worker(listen) as endpoint:
        address = endpoint.address.replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        assert await snapshot(address) == REPLY
        assert await health(address) is Health.NOT_SERVING
        endpoint.set_serving(True)
        assert await health(address) is Health.SERVING


@on_shared_loop
async def test_one_port_is_all_that_listens() -> None:
    before = ports()
    async with worker() as endpoint:
        assert ports() - before == {int(endpoint.address.rpartition(":")[2])}
    assert ports() == before


def ports() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}


@on_shared_loop
async def test_a_port_that_somebody_has() -> None:
    async with worker() as first:
        with pytest.raises(ListenError, match="another process already listens there"):
            async with worker(first.address):
                pass
        assert await snapshot(first.address) == REPLY


@on_shared_loop
async def test_our_opening_gets_our_server() -> None:
    """That server knows one method, and says so in gRPC's terms."""
    async with worker() as endpoint:
        call = Call(PlainConnection(await connect(endpoint)), LIMITS)
        call.open(endpoint.address, "/shardnet.v1.Stats/Snapshot", ())
        status = Status.read(await call.headers())
        assert status.code is grpc.StatusCode.UNIMPLEMENTED
        call.close()


@on_shared_loop
async def test_an_opening_in_pieces() -> None:
    loop = asyncio.get_running_loop()
    async with worker() as endpoint:
        with await connect(endpoint) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for byte in OPENING:
                await loop.sock_sendall(sock, bytes([byte]))
                await asyncio.sleep(0)
            assert (await loop.sock_recv(sock, 4))[3] == 4  # a SETTINGS frame


@on_shared_loop
async def test_who_does_not_go_on_is_shown_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callers stop after nothing, half an opening, and an opening without a request; all at once, as each uses the full timeout."""
    be_impatient(monkeypatch)
    loop = asyncio.get_running_loop()

    async def wait_for_the_end(endpoint: Endpoint, said: bytes) -> None:
        with await connect(endpoint) as sock:
            await loop.sock_sendall(sock, said)
            async with asyncio.timeout(BRIEF_S + 2):
                while await loop.sock_recv(sock, 4096):
                    pass

    async with worker() as endpoint, asyncio.TaskGroup() as callers:
        for said in (b"", OPENING[:10], OPENING):
            callers.create_task(wait_for_the_end(endpoint, said), name=f"after {said!r}")


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01", OPENING[:24]], ids=["web", "TLS", "no settings"])
@on_shared_loop
async def test_who_stays_when_grpcio_has_closed_is_shown_the_door(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A half-closed connection would keep a descriptor at each end for as long as the caller likes."""
    be_impatient(monkeypatch)
    loop = asyncio.get_running_loop()
    async with worker() as endpoint:
        with await connect(endpoint) as sock:
            await loop.sock_sendall(sock, said)
            async with asyncio.timeout(BRIEF_S + 2):
                while await loop.sock_recv(sock, 4096):
                    pass
                door = endpoint._door
                assert door is not None
                while connections := door._tasks._tasks.difference(door._listeners):
                    await asyncio.wait(connections)


@on_shared_loop
async def test_who_does_not_take_an_answer_is_shown_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpcio gives the connection up, but its answer no longer fits into the caller's socket."""
    monkeypatch.setattr("shardnet.transport.front_door._STALL_S", 0.2)
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as behind:
        behind.setblocking(False)
        near, far = sockets()
        admission = Admission()
        admission._place = behind.getsockname()
        relaying = asyncio.ensure_future(_relay(b"hello", PlainConnection(far), admission))
        server, _ = await loop.sock_accept(behind)
        server.setblocking(False)
        answering = asyncio.ensure_future(loop.sock_sendall(server, bytes(64 * MIB)))
        with near, far, server:
            async with asyncio.timeout(5.0):
                await relaying
            with pytest.raises(ConnectionError):
                await answering


class Unlucky(socket.socket):
    """A listener whose first connections have errors of their own."""

    def accept(self) -> "tuple[socket.socket, object]":
        if self.problems:
            raise OSError(self.problems.pop(), "as accept(2) says")
        return super().accept()

    problems: list[int]


@on_shared_loop
async def test_a_connection_that_cannot_be_taken_is_not_the_last(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged once per second, however long there are no descriptors."""
    monkeypatch.setattr("shardnet.transport.front_door._REST_S", 0.0)
    listener = Unlucky()
    listener.problems = [errno.EPROTO, *[errno.EMFILE] * 9]
    listener.setblocking(False)
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    taken = asyncio.Event()

    async def take(connection: Connection) -> None:
        taken.set()

    door = FrontDoor([listener], Admission(), Security(), take)
    with socket.create_connection(listener.getsockname()) as caller:
        caller.sendall(OPENING)
        async with asyncio.timeout(5.0):
            await taken.wait()
    await door.aclose()
    assert [record.getMessage() for record in caplog.records] == ["cannot accept a connection: as accept(2) says"]


async def nobody(connection: Connection) -> None:
    raise AssertionError("nobody called")


@on_shared_loop
async def test_closing_at_once_closes_the_socket() -> None:
    """Its task is cancelled before it has begun, so it runs no `finally`."""
    (listener,) = await listening_sockets(Address.parse("127.0.0.1:0"))
    door = FrontDoor([listener], Admission(), Security(), nobody)
    await door.aclose()
    assert listener.fileno() == -1


@on_shared_loop
async def test_two_that_bind_at_the_same_moment() -> None:
    """The kernel lets both bind as long as neither listens; the second one must get our own error message."""
    (first,) = await listening_sockets(Address.parse("127.0.0.1:0"))
    with first:
        where = first.getsockname()
        with pytest.raises(OSError, match="in use"):
            listening._bind(socket.AF_INET, where)


@on_shared_loop
async def test_closing_cuts_what_is_left() -> None:
    loop = asyncio.get_running_loop()
    async with worker() as endpoint:
        with await connect(endpoint) as silent, await connect(endpoint) as relayed:
            await loop.sock_sendall(relayed, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            assert await loop.sock_recv(relayed, 4096)
            async with asyncio.timeout(2.0):
                await endpoint.aclose(0)
                for sock in (silent, relayed):
                    while await loop.sock_recv(sock, 4096):
                        pass


def accepted(port: int) -> int:
    """How many connections to a port this process has taken out of the kernel's queue."""
    return sum(c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED for c in psutil.Process().net_connections("tcp"))


@on_shared_loop
async def test_strangers_who_say_nothing_take_few_descriptors_and_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """[Note: strangers]"""
    monkeypatch.setattr(strangers, "MOST", 4)
    monkeypatch.setattr(strangers, "FAIR_S", 0.05)
    async with worker() as endpoint:
        silent = [await connect(endpoint) for _ in range(40)]
        port = silent[0].getpeername()[1]
        most = 0
        asking = asyncio.ensure_future(snapshot(endpoint.address))  # behind all of them in the kernel's queue
        while not asking.done():
            most = max(most, accepted(port))
            await asyncio.sleep(0.01)
        assert await asking == REPLY
        assert most == 4
        for sock in silent:
            sock.close()


@on_shared_loop
async def test_who_has_been_let_in_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """And stays, over grpcio and over our own HTTP/2."""
    monkeypatch.setattr(strangers, "MOST", 1)
    monkeypatch.setattr(strangers, "FAIR_S", 60.0)
    async with worker() as endpoint, asyncio.timeout(30.0), AsyncExitStack() as stack:
        for _ in range(3):
            told = await stack.enter_async_context(aclosing(watch(endpoint.address)))
            assert await anext(told) == REPLY
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(endpoint.address))
            await channel.channel_ready()
        assert await snapshot(endpoint.address) == REPLY


@on_shared_loop
async def test_the_handshakes_of_a_port_take_turns() -> None:
    protection = security()
    endpoint = Endpoint("127.0.0.1:0", limits=LIMITS, timeouts=TIMEOUTS, snapshot=lambda: REPLY, security=protection)
    async with endpoint:
        assert endpoint._door is not None
        async with endpoint._door._strangers.step():
            asking = asyncio.ensure_future(snapshot(endpoint.address, security=protection))
            await asyncio.wait({asking}, timeout=0.3)
            assert not asking.done()
        assert await asking == REPLY


@on_shared_loop
async def test_who_waits_for_this_process_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks of a world call at once, and their handshakes wait for each other here."""
    monkeypatch.setattr(strangers, "MOST", 1)
    monkeypatch.setattr(strangers, "FAIR_S", 0.0)
    some, may_go_on = Strangers(), asyncio.Event()

    async def shake() -> None:
        async with some.step():
            await may_go_on.wait()

    shaking = asyncio.ensure_future(shake())
    some.add(shaking)
    await asyncio.sleep(0)  # it has begun
    another = asyncio.ensure_future(some.make_room())
    await asyncio.wait({another}, timeout=0.05)
    assert not another.done()
    may_go_on.set()
    await shaking
    await another


@on_shared_loop
async def test_a_loop_does_one_step_of_a_handshake_in_each_of_its_rounds() -> None:
    some, rounds, at = Strangers(), 0, list[int]()

    async def shake() -> None:
        async with some.step():
            at.append(rounds)

    tasks = [asyncio.ensure_future(shake()) for _ in range(5)]
    while not all(task.done() for task in tasks):
        rounds += 1
        await asyncio.sleep(0)
    assert len(set(at)) == 5
