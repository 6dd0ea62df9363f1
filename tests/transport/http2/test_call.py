"""A call between two of our ends over a real socket, and between one of ours and one of grpcio's."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial

import grpc
import pytest

from shardnet.config import MIB, Limits
from shardnet.errors import ProtocolError
from shardnet.transport.connection import Connection, PlainConnection
from shardnet.transport.http2 import OPENING, Call, CallBroken, Status, frames
from shardnet.transport.http2.frames import ErrorCode, Flags, Type
from shardnet.transport.http2.headers import reply
from shardnet.transport.tls import TlsConnection, handshake
from tests.credentials.made import credentials

LIMITS = Limits(max_message_bytes=16 * MIB)
REQUEST = ("127.0.0.1:1", "/test.Service/Push", (("name", "value %"),))


def sockets() -> tuple[socket.socket, socket.socket]:
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    near.setblocking(False)
    far.setblocking(False)
    return near, far


async def plain() -> tuple[Connection, Connection]:
    near, far = sockets()
    return PlainConnection(near), PlainConnection(far)


async def under_tls() -> tuple[Connection, Connection]:
    near, far = sockets()
    accepting = asyncio.ensure_future(handshake(far, credentials().accepting, accepting=True))
    return await handshake(near, credentials().calling, accepting=False), await accepting


Ends = Callable[[], AbstractAsyncContextManager[tuple[Call, Call, "asyncio.Queue[bytes]"]]]


@pytest.fixture(params=[plain, under_tls], ids=["plain", "TLS"])
def ends(request: pytest.FixtureRequest) -> Ends:
    """Makes a caller, a callee that has answered, and the list of what the callee hears."""
    return partial(_ends, request.param)


@asynccontextmanager
async def _ends(
    connect: Callable[[], Awaitable[tuple[Connection, Connection]]],
) -> AsyncIterator[tuple[Call, Call, "asyncio.Queue[bytes]"]]:
    near, far = await connect()
    heard = asyncio.Queue[bytes]()
    caller = Call(near, LIMITS)
    caller.open(*REQUEST)
    assert await far.receive(len(OPENING)) == OPENING
    callee = Call(far, LIMITS)
    callee.answer()
    assert dict(await callee.headers()).items() >= {":path": REQUEST[1], "name": "value %", "te": "trailers"}.items()
    callee.deliver(lambda message: heard.put_nowait(bytes(message)))
    callee.send_headers(reply((("hello", "you"),)))
    assert ("hello", "you") in await caller.headers()
    try:
        yield caller, callee, heard
    finally:
        caller.close()
        callee.close()


async def test_from_request_to_status(ends: Ends) -> None:
    async with ends() as (caller, callee, heard):
        for message in (b"", b"small", bytes(range(256)) * 40_000):
            await asyncio.gather(caller.send(message[:3], message[3:]), until(heard, message))
        caller.end()
        await callee.ended()
        callee.send_status(Status(grpc.StatusCode.DATA_LOSS, "100 % lost: für immer"))
        assert Status.read(await caller.headers()) == Status(grpc.StatusCode.DATA_LOSS, "100 % lost: für immer")


async def test_a_status_is_short_and_printable(ends: Ends) -> None:
    """It goes into log lines and onto terminals, and a header block has a limit."""
    async with ends() as (caller, callee, _):
        callee.send_status(Status(grpc.StatusCode.DATA_LOSS, "\x1b[2J" + 5000 * "\N{DROMEDARY CAMEL}"))
        details = Status.read(await caller.headers()).details
        assert details.startswith("\\x1b[2J\N{DROMEDARY CAMEL}")
        assert 900 < len(details) <= 1001


async def until(heard: "asyncio.Queue[bytes]", message: bytes) -> None:
    assert await heard.get() == message


async def test_many_at_once_keep_their_order(ends: Ends) -> None:
    async with ends() as (caller, _, heard):
        messages = [bytes([index]) * (index * index * 5000) for index in range(16)]
        sending = asyncio.gather(*(caller.send(message) for message in messages))
        assert [await heard.get() for _ in messages] == messages
        await sending


def watched(monkeypatch: pytest.MonkeyPatch, connection: Connection, name: str) -> list[object]:
    """What the connection is called with."""
    calls: list[object] = []
    method = getattr(connection, name)

    def call(argument: object) -> object:
        calls.append(argument)
        return method(argument)

    monkeypatch.setattr(connection, name, call)
    return calls


async def test_small_messages_of_one_turn_go_out_together(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ends() as (caller, _, heard):
        writes = watched(monkeypatch, caller._connection, "sendmsg")
        messages = [bytes([index]) * 10 for index in range(5)]
        for message in messages:
            caller.send_now(message)
        assert [await heard.get() for _ in messages] == messages
        assert len(writes) == 1


async def test_a_message_is_sent_when_the_peer_reads() -> None:
    """The message is larger than all buffers of the kernel: `send` waits for the reader, and then ends."""
    near, far = sockets()
    caller = Call(PlainConnection(near), LIMITS)
    caller.open(*REQUEST)
    caller._writer.set_initial_window(frames.MAX_WINDOW)  # as if the peer had granted it
    caller._writer.widen(0, 10**9)
    sending = asyncio.ensure_future(caller.send(bytes(64 * MIB)))
    await asyncio.wait({sending}, timeout=0.2)
    assert not sending.done()
    with far:
        while not sending.done():
            await asyncio.get_running_loop().sock_recv(far, MIB)
    await sending
    caller.close()


async def test_a_cancelled_message_arrives_as_it_was(ends: Ends) -> None:
    """The sender's buffer is free at once, though only a part of the message is sent."""
    async with ends() as (caller, callee, heard):
        asyncio.get_running_loop().remove_reader(callee._connection.socket)  # the callee does not read for a while
        lent = bytearray(b"x" * 12 * MIB)
        sending = asyncio.ensure_future(caller.send(lent))
        await asyncio.wait({sending}, timeout=0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        lent[:] = bytes(len(lent))
        asyncio.get_running_loop().add_reader(callee._connection.socket, callee._readable)
        await caller.send(b"next")
        assert await heard.get() == b"x" * 12 * MIB
        assert await heard.get() == b"next"


async def test_small_messages_wait_for_room(ends: Ends) -> None:
    """The data that waits is bounded: a slow reader holds up the writer and does not fill the memory."""
    async with ends() as (caller, callee, heard):
        asyncio.get_running_loop().remove_reader(callee._connection.socket)
        message = bytes(30_000)
        sending = asyncio.ensure_future(flood(caller, message, 1000))
        await asyncio.wait({sending}, timeout=0.2)
        assert not sending.done()
        assert caller._writer.queued_bytes < 2 * LIMITS.chunk_bytes + len(message) + 10
        asyncio.get_running_loop().add_reader(callee._connection.socket, callee._readable)
        for _ in range(1000):
            assert await heard.get() == message
        await sending


async def flood(caller: Call, message: bytes, count: int) -> None:
    for _ in range(count):
        await caller.send(message)


async def test_windows_are_filled_up_again(monkeypatch: pytest.MonkeyPatch, ends: Ends) -> None:
    """A window is two gigabytes; here it is a thousandth of that."""
    monkeypatch.setattr("shardnet.transport.http2.state._REFILL_BYTES", MIB)
    async with ends() as (caller, _, heard):
        for _ in range(5):
            await asyncio.gather(caller.send(bytes(MIB)), heard.get())
        assert caller._writer.stream_window > frames.MAX_WINDOW - 3 * MIB
        assert caller._writer.connection_window > frames.MAX_WINDOW - 3 * MIB


async def test_a_stranger_gets_no_memory() -> None:
    """Before the call is accepted, messages are refused by their length, and no buffer is allocated for them."""
    with caller_and_peer() as (caller, peer):
        await asyncio.get_running_loop().sock_sendall(peer, frames.frame(Type.DATA, Flags.NONE, 1, b"\0\0\0\0\1x"))
        with pytest.raises(ProtocolError, match=r"a message of 1 bytes is larger than allowed \(0 bytes\)"):
            await caller.headers()


async def test_a_caller_that_is_not_let_in_may_not_talk_for_ever() -> None:
    """Empty frames cost the loop microseconds each, and a megabyte holds a hundred thousand of them."""
    near, far = sockets()
    callee, loop = Call(PlainConnection(far), LIMITS), asyncio.get_running_loop()
    callee.answer()
    with near:
        flooding = asyncio.ensure_future(loop.sock_sendall(near, frames.frame(Type.DATA, Flags.NONE, 1) * MIB))
        with pytest.raises(ProtocolError, match="more than 65536 bytes that this process did not ask for"):
            await callee.headers()
        callee.close()
        with pytest.raises(ConnectionError):
            await flooding


@contextmanager
def callee_and_peer() -> Iterator[tuple[Call, socket.socket]]:
    """A callee's call that has answered, and the caller's raw end."""
    near, far = sockets()
    callee = Call(PlainConnection(far), LIMITS)
    callee.answer()
    with near:
        yield callee, near
        callee.close()


def request_of(size: int) -> bytes:
    """The only message of a caller."""
    return frames.frame(Type.DATA, Flags.END_STREAM, 1, b"\0" + size.to_bytes(4) + bytes(size))


async def test_a_request_may_come_before_it_is_wanted() -> None:
    with callee_and_peer() as (callee, peer):
        await asyncio.get_running_loop().sock_sendall(peer, request_of(4096))
        assert await callee.request() == bytes(4096)


async def test_a_request_of_more_than_a_request_takes() -> None:
    with callee_and_peer() as (callee, peer):
        await asyncio.get_running_loop().sock_sendall(peer, request_of(4097))
        with pytest.raises(ProtocolError, match=r"a message of 4097 bytes is larger than allowed \(4096 bytes\)"):
            await callee.request()


async def test_a_stream_that_begins_before_it_is_let_in() -> None:
    with callee_and_peer() as (callee, peer):
        await asyncio.get_running_loop().sock_sendall(peer, request_of(3))
        await callee.ended()
        with pytest.raises(ProtocolError, match="a message of 3 bytes came before this process had accepted the call"):
            callee.deliver(lambda message: None)


async def test_who_is_heard_out_may_say_as_much_again() -> None:
    """It may have to answer pings for hours."""
    pongs = frames.frame(Type.PING, Flags.ACK, 0, bytes(8)) * 2400  # 40 KiB; 64 may be said
    with callee_and_peer() as (callee, peer):
        loop = asyncio.get_running_loop()
        for _ in range(4):
            before = callee._allowed_bytes
            assert before == 64 * 1024
            await loop.sock_sendall(peer, pongs)
            while callee._allowed_bytes != before - len(pongs):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
            callee.hear_out()


class TestEnds:
    async def test_the_peer_closes(self, ends: Ends) -> None:
        async with ends() as (caller, callee, _):
            waiting = asyncio.ensure_future(caller.headers())
            callee.close()
            with pytest.raises(CallBroken, match="its connection broke"):
                await waiting
            with pytest.raises(CallBroken):
                await flood(caller, bytes(100_000), 100)

    async def test_the_peers_last_words(self, ends: Ends) -> None:
        """The peer says why, and closes at once with unread data, which resets the connection."""
        async with ends() as (caller, callee, _):
            asyncio.get_running_loop().remove_reader(callee._connection.socket)
            asyncio.get_running_loop().remove_reader(caller._connection.socket)
            await caller.send(b"x")
            callee.send_status(Status(grpc.StatusCode.DATA_LOSS, "enough of this"))
            callee._connection.close()
            asyncio.get_running_loop().add_reader(caller._connection.socket, caller._readable)
            assert Status.read(await caller.headers()).details == "enough of this"
            callee._broken = CallBroken("closed above")

    async def test_the_peer_says_farewell_and_stays(self) -> None:
        """The peer ends TLS only, after data, and sends nothing more: the socket does not report that again."""
        near, far = await under_tls()
        assert isinstance(far, TlsConnection)
        caller = Call(near, LIMITS)
        far._tls.write(frames.settings({}))
        with pytest.raises(ssl.SSLWantReadError):  # for the caller's own
            far._tls.unwrap()
        far._put(far._outgoing.read())
        far.flush()
        with pytest.raises(CallBroken, match="it was closed"):
            await asyncio.wait_for(caller.headers(), 2.0)
        far.close()

    async def test_closing_ends_who_waits(self, ends: Ends) -> None:
        async with ends() as (caller, callee, _):
            asyncio.get_running_loop().remove_reader(callee._connection.socket)
            waiting = [asyncio.ensure_future(work) for work in (caller.headers(), caller.ended(), caller.send(bytes(64 * MIB)))]
            await asyncio.wait(waiting, timeout=0.05)
            caller.close("enough")
            caller.close("once more")
            for each in waiting:
                with pytest.raises(CallBroken, match="enough"):
                    await each

    async def test_why_reaches_a_peer_that_is_still_sending(self, ends: Ends) -> None:
        """Closing a socket with unread data resets the connection, and the peer would see that instead of the status."""
        async with ends() as (caller, callee, _):
            callee.deliver(refuse)
            sending = asyncio.ensure_future(flood(caller, bytes(MIB), 50))
            with pytest.raises(ProtocolError, match="not like this"):
                await callee.ended()
            callee.send_status(Status(grpc.StatusCode.DATA_LOSS, "not like this"))
            lingering = asyncio.ensure_future(callee.linger(5.0))
            assert Status.read(await caller.headers()).details == "not like this"
            caller.close()
            await lingering
            await asyncio.wait({sending})
            assert isinstance(sending.exception(), CallBroken | None)

    async def test_nothing_follows_the_end(self, ends: Ends) -> None:
        """Nor does data that waited for room: it would come after the end of its stream."""
        async with ends() as (caller, callee, heard):
            asyncio.get_running_loop().remove_reader(callee._connection.socket)
            sending = asyncio.ensure_future(flood(caller, bytes(30_000), 1000))
            await asyncio.wait({sending}, timeout=0.1)
            caller.end()
            with pytest.raises(CallBroken, match="this rank has ended the stream"):
                await sending
            with pytest.raises(CallBroken, match="this rank has ended the stream"):
                await caller.send(b"more")
            asyncio.get_running_loop().add_reader(callee._connection.socket, callee._readable)
            await callee.ended()
            count = heard.qsize()
            callee.send_status(Status(grpc.StatusCode.OK))
            assert Status.read(await caller.headers()).code is grpc.StatusCode.OK
            assert 0 < count == heard.qsize() < 1000

    async def test_an_end_without_a_status(self) -> None:
        """For example from a proxy: nothing else would come, and the stream would count as open for ever."""
        with caller_and_peer() as (caller, peer):
            said = frames.frame(Type.HEADERS, Flags.END_HEADERS, 1, b"\x88") + frames.frame(Type.DATA, Flags.END_STREAM, 1)
            await asyncio.get_running_loop().sock_sendall(peer, said)
            assert await caller.headers() == ((":status", "200"),)
            with pytest.raises(CallBroken, match="ended the stream without a status"):
                await caller.headers()

    async def test_what_was_said_last_reaches_a_peer_that_reads_late(self, ends: Ends) -> None:
        """A full socket holds up messages and the status: none overtakes another, and closing waits for all."""
        async with ends() as (caller, callee, _):
            heard: list[int] = []
            caller.deliver(lambda message: heard.append(len(message)))
            asyncio.get_running_loop().remove_reader(caller._connection.socket)
            sending = asyncio.gather(callee.send(bytes(12 * MIB)), callee.send(bytes(MIB)))
            await asyncio.wait({sending}, timeout=0.1)
            assert not sending.done()
            callee.send_status(Status(grpc.StatusCode.OK))
            lingering = asyncio.ensure_future(callee.linger(5.0))
            await asyncio.wait({lingering}, timeout=0.1)
            asyncio.get_running_loop().add_reader(caller._connection.socket, caller._readable)
            assert Status.read(await caller.headers()) == Status(grpc.StatusCode.OK)
            assert heard == [12 * MIB, MIB]
            caller.close()
            await asyncio.gather(sending, lingering)


def refuse(message: memoryview) -> None:
    raise ProtocolError("not like this")


class TestFrames:
    """Frames that a peer of another implementation may send."""

    @pytest.mark.parametrize(
        ("said", "text"),
        [
            (frames.reset(1, ErrorCode.CANCEL), "it closed the stream"),
            (frames.reset(1, ErrorCode.REFUSED_STREAM), "HTTP/2 error 7"),
            (frames.frame(Type.GOAWAY, 0, 0, bytes(7) + b"\x0btoo_many_pings"), "its connection broke .too_many_pings"),
            (frames.frame(Type.WINDOW_UPDATE, 0, 0, bytes(4)), "a WINDOW_UPDATE frame adds 0 bytes"),
            (frames.frame(Type.WINDOW_UPDATE, 0, 0, bytes(3)), "that carries one number has 3 bytes"),
            (frames.frame(Type.SETTINGS, 0, 0, bytes(5)), "not a multiple of 6 bytes"),
            (frames.frame(Type.HEADERS, Flags.END_HEADERS, 1, b"\xff\xff\xff"), "header block cannot be decoded"),
            (frames.frame(Type.HEADERS, Flags.NONE, 1, b"\x88") + frames.frame(Type.PING, 0, 0, bytes(8)), "interrupted"),
            (frames.frame(Type.HEADERS, Flags.END_HEADERS, 1, b"\x88") * 9, "too many header blocks"),
            (frames.frame(Type.HEADERS, Flags.NONE, 1) + frames.frame(Type.PING, 0, 0, bytes(8)), "interrupted"),
            (
                frames.frame(Type.HEADERS, Flags.END_HEADERS, 3, b"\xff\xff\xff"),
                "a header block came for stream 3, but a connection carries only one call",
            ),
            (frames.frame(Type.HEADERS, Flags.END_HEADERS, 1, b"\x88" * 1000), "header block cannot be decoded"),
            (frames.frame(Type.GOAWAY, 0, 0, bytes(7) + b"\x0b\x1b[2Jcleared"), r"its connection broke .\\x1b\[2Jcleared"),
            (frames.frame(Type.CONTINUATION, Flags.END_HEADERS, 1, b"\x88"), "came without a header block"),
            (frames.frame(Type.PING, 0, 0, bytes(20000)), "a PING frame has 20000 bytes"),
            (frames.frame(Type.HEADERS, Flags.NONE, 1, bytes(30000)) + 3 * frames.frame(Type.CONTINUATION, 0, 1, bytes(30000)), "too long"),
        ],
    )
    async def test_that_end_it(self, said: bytes, text: str) -> None:
        with caller_and_peer() as (caller, peer):
            await asyncio.get_running_loop().sock_sendall(peer, said)
            with pytest.raises((CallBroken, ProtocolError), match=text):
                await caller.ended()

    def test_a_servers_reason_for_wanting_tls_is_printable(self) -> None:
        said = frames.settings({}) + frames.goaway(ErrorCode.INADEQUATE_SECURITY, "\x1b[2Jcleared")
        assert frames.inadequate_security(said) == r"\x1b[2Jcleared"

    async def test_that_are_nothing_to_us(self) -> None:
        said = b"".join(
            (
                frames.frame(Type.PRIORITY, 0, 1, bytes(5)),
                frames.frame(Type.GOAWAY, 0, 0, bytes(8)),  # no error: what is under way may end
                frames.frame(Type.SETTINGS, Flags.ACK, 0),
                frames.frame(Type.PING, Flags.ACK, 0, bytes(8)),
                frames.frame(Type.WINDOW_UPDATE, 0, 5, b"\0\0\0\1"),
                frames.reset(3, ErrorCode.CANCEL),
                frames.head(3, 0x77, 0, 0) + b"???",
            )
        )
        with caller_and_peer() as (caller, peer):
            await asyncio.get_running_loop().sock_sendall(peer, said + frames.frame(Type.HEADERS, Flags.END_HEADERS, 1, b"\x88"))
            assert await caller.headers() == ((":status", "200"),)

    async def test_a_block_in_parts(self) -> None:
        said = frames.frame(Type.HEADERS, Flags.PADDED | Flags.PRIORITY, 1, b"\2" + bytes(5) + b"\x88" + bytes(2))
        said += frames.frame(Type.CONTINUATION, Flags.END_HEADERS, 1, b"\x84")
        with caller_and_peer() as (caller, peer):
            await asyncio.get_running_loop().sock_sendall(peer, said)
            assert await caller.headers() == ((":status", "200"), (":path", "/"))

    async def test_pings_are_answered(self) -> None:
        loop = asyncio.get_running_loop()
        with caller_and_peer() as (_, peer):
            await loop.sock_sendall(peer, frames.frame(Type.PING, 0, 0, b"are you?"))
            said = b""
            while frames.frame(Type.PING, Flags.ACK, 0, b"are you?") not in said:
                said += await loop.sock_recv(peer, 4096)


@contextmanager
def caller_and_peer() -> Iterator[tuple[Call, socket.socket]]:
    near, far = sockets()
    caller = Call(PlainConnection(near), LIMITS)
    caller.open(*REQUEST)
    with far:
        yield caller, far
    caller.close()


@pytest.mark.parametrize("options", [(), (("grpc.http2.max_frame_size", 20_000), ("grpc.http2.lookahead_bytes", 30_000))])
async def test_a_server_of_grpcio_with_small_windows(options: tuple[tuple[str, int], ...]) -> None:
    """The server grants its window bit by bit, as a proxy does."""
    received: list[bytes] = []

    async def push(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.send_initial_metadata((("hello", "caller"),))
        received.extend([request async for request in requests])
        return b""

    server = grpc.aio.server(options=[*options, ("grpc.max_receive_message_length", 16 * MIB)])
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(push)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", {"Push": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sock = socket.create_connection(("127.0.0.1", port))
    sock.setblocking(False)
    caller = Call(PlainConnection(sock), LIMITS)
    caller.open(f"127.0.0.1:{port}", "/test.Service/Push", ())
    assert ("hello", "caller") in await caller.headers()
    messages = [b"a" * 3 * MIB, b"", b"b" * 100_000, b"c" * 10]
    for message in messages:
        await caller.send(message)
    caller.end()
    assert Status.read(await caller.headers()) == Status(grpc.StatusCode.OK)
    assert received == messages
    caller.close()
    await server.stop(0)
