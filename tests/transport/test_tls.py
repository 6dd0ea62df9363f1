"""Bytes under TLS arrive as they were sent, or there is an error that says why not."""

import asyncio
import random
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from shardnet.config import KIB, MIB
from shardnet.credentials import Credentials, Identity, Role
from shardnet.errors import HandshakeError
from shardnet.transport.tls import TlsBroken, TlsConnection, handshake
from tests.credentials.made import credentials
from tests.transport.http2.test_call import sockets


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[TlsConnection, TlsConnection]]:
    """The caller's end and the callee's."""
    near, far = sockets()
    caller, callee = await asyncio.gather(
        handshake(near, credentials("caller").calling, accepting=False), handshake(far, credentials("callee").accepting, accepting=True)
    )
    try:
        yield caller, callee
    finally:
        caller.close()
        callee.close()


async def test_it_sleeps_for_no_more_than_is_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """However encrypted bytes are cut on their way, and whether they are in our memory or in OpenSSL's."""
    async with connected() as (caller, callee):
        near, far = sockets()
        own, callee.socket, slept = callee.socket, far, False
        came, store = [0], callee._store

        def count(data: bytes | memoryview) -> None:
            came[0] += len(data)
            store(data)

        monkeypatch.setattr(callee, "_store", count)
        try:
            for seed in range(20):
                steps, size, got, at = random.Random(seed), 200_000, 0, 0
                for first in range(0, size, 16 * KIB):
                    caller._tls.write(bytes(min(16 * KIB, size - first)))
                encrypted, came[:] = caller._outgoing.read(), [0]
                while got < size:
                    step = steps.choice([1, 5, 100, 16_000, 17_000, 50_000])
                    near.sendall(encrypted[at : at + step])
                    at = min(at + step, len(encrypted))
                    with suppress(BlockingIOError):
                        got += callee.recv_into(memoryview(bytearray(size - got)))
                    callee.wake_at(max(1, size - got))
                    low_water = far.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)
                    assert low_water <= max(1, len(encrypted) - came[0])
                    slept |= low_water > 1
            assert slept
        finally:
            callee.socket = own
            near.close()
            far.close()


async def readable(connection: TlsConnection) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.socket, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.socket)


async def read(connection: TlsConnection, room: memoryview) -> int:
    while True:
        try:
            return connection.recv_into(room)
        except BlockingIOError:
            await readable(connection)


async def write(connection: TlsConnection, buffers: list[memoryview]) -> None:
    """Write all of it, as the http2 writer does: its owner may change bytes as soon as they are taken."""
    while buffers:
        try:
            taken = connection.sendmsg(buffers)
        except BlockingIOError:
            await asyncio.sleep(0)
            continue
        while taken:
            step = min(taken, len(buffers[0]))
            buffers[0][:step] = bytes(step)
            buffers[0], taken = buffers[0][step:], taken - step
            if not buffers[0]:
                del buffers[0]
    await until_flushed(connection)


async def until_flushed(connection: TlsConnection) -> None:
    while True:
        try:
            return connection.flush()
        except BlockingIOError:
            await asyncio.sleep(0)


async def test_each_knows_the_other() -> None:
    async with connected() as (caller, callee):
        assert (callee.identity, caller.identity) == (Identity(Role.WORKER, "caller"), Identity(Role.WORKER, "callee"))


@pytest.mark.parametrize("seed", range(5))
async def test_bytes_arrive_as_they_were_sent(seed: int) -> None:
    """In pieces of any size on both sides: smaller than a record, exactly one, or many."""
    chance = random.Random(seed)
    sizes = [chance.choice((0, 1, 9, 50, 16 * KIB - 1, 16 * KIB, 16 * KIB + 1, 64 * KIB, chance.randrange(MIB))) for _ in range(40)]
    sent = [chance.randbytes(size) for size in sizes]
    async with connected() as (caller, callee):
        writing = asyncio.ensure_future(write(caller, [memoryview(bytearray(piece)) for piece in sent if piece]))
        received, total = bytearray(), sum(sizes)
        while len(received) < total:
            room = memoryview(bytearray(chance.choice((1, 100, 16 * KIB, MIB))))
            count = await read(callee, room)
            assert count
            received += room[:count]
        await writing
        assert received == b"".join(sent)
        assert caller.written_bytes > total


async def test_a_full_socket_takes_no_more_than_a_batch() -> None:
    """Bytes that were taken wait encrypted: a slow reader holds up the sender, and does not fill the memory."""
    async with connected() as (caller, _):
        data = memoryview(bytes(MIB))
        with pytest.raises(BlockingIOError):
            fill(caller, data)
        before = caller.written_bytes
        for _ in range(3):
            with pytest.raises(BlockingIOError):
                caller.sendmsg([data])
        assert caller.written_bytes == before
        assert 0 < caller.unacknowledged_bytes <= before


async def test_the_end_behind_data() -> None:
    """OpenSSL reports the end as zero bytes read, each time that one asks."""
    async with connected() as (caller, callee):
        await caller.send_all(b"last words")
        caller.finish()
        await readable(callee)
        room = memoryview(bytearray(100))
        assert callee.recv_into(room) == 10
        assert callee.recv_into(room) == 0


async def test_a_reset_behind_data() -> None:
    """Data sent before the reset arrives, as over a plain socket: it may say why."""
    async with connected() as (caller, callee):
        await callee.send_all(b"unread, so that closing resets")
        await readable(caller)
        await caller.send_all(b"last words")
        caller.close()
        await readable(callee)
        room = memoryview(bytearray(100))
        assert callee.recv_into(room) == 10
        with pytest.raises(ConnectionResetError):
            callee.recv_into(room)


async def test_a_farewell_is_said() -> None:
    """So the end comes from the peer, and not from somebody in between."""
    async with connected() as (caller, callee):
        caller.finish()
        await readable(callee)
        callee._fetch()
        assert callee._tls.read(10) == b""  # without one it would want more


async def test_what_waits_is_not_acknowledged() -> None:
    async with connected() as (caller, _):
        with pytest.raises(BlockingIOError):
            fill(caller, memoryview(bytes(MIB)))
        assert caller.unacknowledged_bytes > super(TlsConnection, caller).unacknowledged_bytes > 0


async def test_no_older_tls() -> None:
    near, far = sockets()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode, context.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with near, far:
        calling = asyncio.ensure_future(handshake(near, context, accepting=False))
        with pytest.raises(HandshakeError, match=r"does not support TLS 1\.3"):
            await handshake(far, credentials().accepting, accepting=True)
        with pytest.raises(HandshakeError, match=r"does not accept TLS 1\.3"):
            await calling


async def test_a_callee_says_nothing_that_nobody_asked_for() -> None:
    """It sends no session tickets: a caller that only sends would leave them unread, and closing would reset the connection."""
    async with connected() as (caller, _):
        with pytest.raises(BlockingIOError):
            caller.socket.recv(1)


def fill(connection: TlsConnection, data: memoryview) -> None:
    while True:
        connection.sendmsg([data])


async def test_the_end_is_the_end() -> None:
    async with connected() as (caller, callee):
        await caller.send_all(b"last words")
        caller.finish()
        assert await callee.receive(100) == b"last words"
        assert await callee.receive(100) == b""
        assert await read(callee, memoryview(bytearray(10))) == 0


async def test_what_was_altered_is_an_error() -> None:
    """None of it is passed on."""
    near, middle = sockets()
    middle_2, far = sockets()
    loop = asyncio.get_running_loop()

    async def pass_on(source: socket.socket, target: socket.socket) -> None:
        while data := await loop.sock_recv(source, 64 * KIB):
            await loop.sock_sendall(target, data)

    passing = [asyncio.ensure_future(pass_on(*ends)) for ends in ((middle, middle_2), (middle_2, middle))]
    caller, callee = await asyncio.gather(
        handshake(near, credentials().calling, accepting=False), handshake(far, credentials().accepting, accepting=True)
    )
    for task in passing:
        task.cancel()
    await asyncio.wait(passing)
    with middle, middle_2:
        await caller.send_all(bytes(1000))
        record = bytearray(await loop.sock_recv(middle, 64 * KIB))
        record[500] ^= 1
        await loop.sock_sendall(middle_2, record)
        room = memoryview(bytearray(b"x" * 1000))
        with pytest.raises(TlsBroken, match=r"bad record mac|decryption failed"):
            await read(callee, room)
        assert bytes(room) == b"x" * 1000
    caller.close()
    callee.close()


async def test_what_came_with_the_handshake_is_not_forgotten() -> None:
    """A caller may send its first data right after the handshake's last message: the socket does not report it again."""
    near, far = sockets()
    accepting = asyncio.ensure_future(handshake(far, credentials().accepting, accepting=True))
    caller = await handshake(near, credentials().calling, accepting=False)
    await caller.send_all(b"hello")  # before the callee has looked
    callee = await accepting
    assert await callee.receive(10) == b"hello"
    caller.close()
    callee.close()


@pytest.mark.parametrize(
    ("caller", "callee", "callers_view"),
    [
        (credentials(by="another"), credentials(), "not one of this cluster's: unable to get local issuer|self-signed"),
        (credentials(), credentials(by="another"), "not one of this cluster's: unable to get local issuer|self-signed"),
        (credentials(), credentials("me", Role.OPERATOR), "not one of this cluster's: unsuitable certificate purpose"),
    ],
    ids=["a caller of another authority", "a callee of another authority", "an operator that listens"],
)
async def test_who_is_not_trusted(caller: Credentials, callee: Credentials, callers_view: str) -> None:
    """The caller notices first, because the callee's certificate comes first."""
    near, far = sockets()
    with near, far:
        calling = asyncio.ensure_future(handshake(near, caller.calling, accepting=False))
        accepting = asyncio.ensure_future(handshake(far, callee.accepting, accepting=True))
        with pytest.raises(HandshakeError, match=callers_view):
            await calling
        with pytest.raises(HandshakeError, match=r"does not trust the authority|does not accept this process's certificate"):
            await accepting
