"""How a rank opens its stream to a peer: what is tried again, and what is not."""

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.topology import Member
from shardnet.transport.connection import Connection, PlainConnection
from shardnet.transport.hello import ACCEPTED, Hello
from shardnet.transport.http2 import OPENING, Call
from shardnet.transport.http2.headers import reply
from shardnet.transport.outbox import Outbox
from tests.shared_loop import on_shared_loop

PATIENCE_S = 20.0
Serve = Callable[[Connection], Awaitable[object]]


class Peer:
    """A port that does one thing with each caller, and then closes the connection."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()
        self.member = Member(1, 1, 0, f"{host}:{port}", "node", "w1")
        self.served = asyncio.Queue[None]()  # one for each connection

    async def run(self, *, most: int | None) -> None:
        """`most` connections; nothing listens after the last."""
        with self._listener:
            for _ in itertools.count() if most is None else range(most):
                sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
                sock.setblocking(False)
                with sock:
                    await self._serve(PlainConnection(sock))
                self.served.put_nowait(None)


@asynccontextmanager
async def peer(serve: Serve, *, most: int | None = None) -> AsyncIterator[Peer]:
    opened = Peer(serve)
    running = asyncio.ensure_future(opened.run(most=most))
    async with asyncio.timeout(PATIENCE_S):
        yield opened
    running.cancel()
    await asyncio.wait({running})


def outbox_to(opened: Peer) -> Outbox:
    return Outbox(opened.member, Hello("job", 1, 0, 1, "w0", ""), Security(), Timeouts.for_tests(), Limits())


async def cut_off(connection: Connection) -> None:
    await connection.receive(len(OPENING))


async def accept(connection: Connection) -> None:
    assert await connection.receive(len(OPENING)) == OPENING
    call = Call(connection, Limits())
    call.answer()
    await call.headers()
    call.send_headers(reply((ACCEPTED,)))
    await asyncio.sleep(0)  # it is written
    call.close()


@on_shared_loop
async def test_one_that_is_cut_off_before_it_was_accepted_calls_again() -> None:
    async with peer(cut_off) as opened:
        running = asyncio.ensure_future(outbox_to(opened).run(lambda: None))
        for _ in range(3):
            await opened.served.get()
        running.cancel()
        await asyncio.wait({running})


@on_shared_loop
async def test_it_does_not_if_nobody_is_there_any_more() -> None:
    """A worker that dies while the mesh forms: others hear of it at once, not when their time is over."""

    async with peer(cut_off, most=1) as opened:
        assert await outbox_to(opened).run(lambda: None) == "its connection broke (Connection refused)"


@on_shared_loop
async def test_nor_if_the_peer_was_given_up_meanwhile() -> None:
    async with peer(cut_off) as opened:
        outbox = outbox_to(opened)
        running = asyncio.ensure_future(outbox.run(lambda: None))
        await opened.served.get()
        while not outbox.problem:  # noqa: ASYNC110 - it pauses from then on
            await asyncio.sleep(0)
        outbox.fail("the rendezvous says that it is gone")
        assert await running == "the rendezvous says that it is gone"
        assert opened.served.empty()


@on_shared_loop
async def test_nor_if_it_was_given_up_while_the_connection_was_made() -> None:
    received = []

    async def listen(connection: Connection) -> None:
        received.append(await connection.receive(1))

    async with peer(listen) as opened:
        outbox = outbox_to(opened)
        running = asyncio.ensure_future(outbox.run(lambda: None))
        await asyncio.sleep(0)  # it dials from here on
        outbox.fail("the rendezvous says that it is gone")
        assert await running == "the rendezvous says that it is gone"
        await opened.served.get()
    assert received == [b""]  # no call was opened on it


@on_shared_loop
async def test_nor_once_it_was_accepted() -> None:
    """What was sent on that stream is lost with it."""
    async with peer(accept) as opened:
        outbox = outbox_to(opened)
        assert await outbox.run(lambda: None) == "its connection broke (it was closed)"
        assert outbox.accepted
        assert opened.served.qsize() == 1


@on_shared_loop
async def test_nor_if_it_shows_no_certificate_where_the_member_has_one() -> None:
    async with peer(accept) as opened:
        opened.member = replace(opened.member, identity="shardnet:worker:job:node-1")
        why = await outbox_to(opened).run(lambda: None)
        assert why is not None
        assert f"the process at {opened.member.address} is a process without a certificate, but the member at this address must be " in why
