"""The relay: bytes come out as they went in, except for what it was told to do to them."""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from shardnet.address import Address
from shardnet.errors import StateError, UsageError
from shardnet.testing import Conditions, FaultNotFired, Kind, Relay, Way

KIB, MIB = 1024, 1024 * 1024
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def server(handler: Handler) -> AsyncIterator[str]:
    """Run a server and yield its address. A connection is closed when its handler has ended."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with suppress(OSError):  # the relay has reset it
            await handler(reader, writer)
        await closed(writer)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()[:2]
    try:
        yield f"{host}:{port}"
    finally:
        listening.close()
        await asyncio.gather(*running)
        await listening.wait_closed()


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(64 * KIB):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@asynccontextmanager
async def caller(address: str) -> AsyncIterator[Ends]:
    where = Address.parse(address)
    reader, writer = await asyncio.open_connection(where.host, where.port)
    try:
        yield reader, writer
    finally:
        await closed(writer)


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):  # the reset has been noticed before
        await writer.wait_closed()


async def said(address: str, data: bytes) -> bytes:
    """Send `data`; return all that comes back."""
    async with caller(address) as (reader, writer):

        async def say() -> None:
            writer.write(data)
            await writer.drain()
            writer.write_eof()

        answer, _ = await asyncio.gather(reader.read(), say())
        return answer


def seconds() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("conditions", [Conditions(), Conditions(latency_s=0.01, jitter_s=0.02), Conditions(slice_bytes=999)])
async def test_everything_arrives_in_order(conditions: Conditions) -> None:
    data = random.Random(1).randbytes(3 * MIB)
    async with server(echo) as address, Relay(address) as relay:
        relay.conditions = conditions
        assert await asyncio.gather(*(said(relay.address, data) for _ in range(3))) == [data] * 3
        assert (relay.passed_bytes(Way.IN), relay.passed_bytes(Way.OUT)) == (9 * MIB, 9 * MIB)


async def test_latency_is_that_of_each_way_and_holds_up_nobody_behind() -> None:
    async with server(echo) as address, Relay(address) as relay:
        relay.conditions = Conditions(latency_s=0.1)
        async with caller(relay.address) as (reader, writer):
            begin_s = seconds()
            for _ in range(50):
                writer.write(bytes(100))
                await writer.drain()
            await reader.readexactly(5000)
            took_s = seconds() - begin_s
        assert 0.2 <= took_s < 2.0, "50 messages one after the other would take 10 s"


async def test_bandwidth_is_that_of_all_connections_together() -> None:
    async with server(echo) as address, Relay(address) as relay:
        relay.conditions = Conditions(bytes_per_s=2 * MIB)
        begin_s = seconds()
        await asyncio.gather(*(said(relay.address, bytes(MIB // 4)) for _ in range(4)))
        assert seconds() - begin_s >= 0.45


async def test_slices_are_segments() -> None:
    async with server(echo) as address, Relay(address) as relay:
        relay.conditions = Conditions(slice_bytes=10, latency_s=0.001)
        sizes: list[int] = []
        async with caller(relay.address) as (reader, writer):
            writer.write(bytes(1000))
            while sum(sizes) < 1000:
                sizes.append(len(await reader.read(KIB)))
        assert len(sizes) > 10


@pytest.mark.parametrize("way", Way)
@pytest.mark.parametrize("kind", Kind)
async def test_harms_are_done_once_to_a_block_that_is_large_enough(kind: Kind, way: Way) -> None:
    data = random.Random(2).randbytes(1000)
    async with server(echo) as address, Relay(address, seed=3) as relay:
        harm = relay.harm(kind, way=way, least_bytes=500)
        assert await said(relay.address, bytes(100)) == bytes(100)
        fired_too_soon = harm.fired
        answers = [await said(relay.address, data) for _ in range(2)]
        assert (fired_too_soon, harm.fired) == (False, True)
    assert answers[1] == data
    match kind:
        case Kind.FLIP:
            assert sum((one ^ other).bit_count() for one, other in zip(answers[0], data, strict=True)) == 1
        case Kind.DUPLICATE:
            assert answers[0] == data * 2
        case Kind.DROP:
            assert answers[0] == b""
        case Kind.TRUNCATE:
            assert answers[0] == data[:500]


async def test_a_harm_that_nobody_met_is_an_error() -> None:
    async def disturb(address: str) -> None:
        async with Relay(address) as relay:
            relay.harm(Kind.FLIP, least_bytes=9)
            relay.harm(Kind.DROP, least_bytes=9)
            await said(relay.address, bytes(8))

    async with server(echo) as address:
        with pytest.raises(FaultNotFired, match=r"was told to flip a bit of a block of 9 bytes or more .* \(1 more harms"):
            await disturb(address)


async def test_an_error_of_the_test_itself_is_not_hidden_by_that() -> None:
    async def fail(address: str) -> None:
        async with Relay(address) as relay:
            relay.harm(Kind.FLIP)
            raise ZeroDivisionError

    async with server(echo) as address:
        with pytest.raises(ZeroDivisionError):
            await fail(address)


async def test_what_is_held_comes_later_and_whole() -> None:
    async with server(echo) as address, Relay(address) as relay, caller(relay.address) as (reader, writer):
        writer.write(b"before")
        assert await reader.readexactly(6) == b"before"
        relay.hold([Way.IN])
        writer.write(b"meanwhile")
        later = asyncio.create_task(said(relay.address, b"a new one"))
        answer = asyncio.create_task(reader.readexactly(9))
        done, _ = await asyncio.wait([answer, later], timeout=0.2)
        assert not done
        assert relay.passed_bytes(Way.IN) == 6
        relay.mend()
        assert (await answer, await later) == (b"meanwhile", b"a new one")


async def test_cut_connections_are_reset_and_so_are_new_ones_until_it_is_mended() -> None:
    async with server(echo) as address, Relay(address) as relay:
        async with caller(relay.address) as (reader, writer):
            writer.write(b"before")
            assert await reader.readexactly(6) == b"before"
            assert relay.connections == 1
            relay.cut()
            with pytest.raises(ConnectionResetError):
                await reader.read()
        with pytest.raises(ConnectionResetError):
            await said(relay.address, b"during")
        relay.mend()
        assert await said(relay.address, b"after") == b"after"
    assert relay.connections == 0


async def test_a_link_that_was_slow_is_fast_at_once() -> None:
    async with server(echo) as address, Relay(address) as relay:
        relay.conditions = Conditions(bytes_per_s=1.0)
        async with caller(relay.address) as (_, writer):
            writer.write(bytes(1000))
            await writer.drain()
            while not relay.connections:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)
        relay.conditions = Conditions()
        begin_s = seconds()
        assert await said(relay.address, b"after") == b"after"
        assert seconds() - begin_s < 2.0


async def test_it_can_be_told_before_it_is_entered_and_is_entered_once() -> None:
    async with server(echo) as address:
        relay = Relay(address)
        relay.conditions = Conditions(slice_bytes=1)
        relay.hold()
        relay.mend()
        with pytest.raises(StateError, match="until it is entered"):
            _ = relay.address
        async with relay:
            assert relay.conditions.slice_bytes == 1
            assert await said(relay.address, b"hello") == b"hello"
            with pytest.raises(StateError, match="entered only once"):
                await relay.__aenter__()
        with pytest.raises(StateError, match="entered only once"):
            await relay.__aenter__()


async def test_nobody_behind_it_is_a_reset() -> None:
    async with server(echo) as address:
        pass
    async with Relay(address) as relay:
        with pytest.raises(ConnectionResetError):
            await said(relay.address, b"hello")


async def test_who_breaks_a_connection_in_the_middle_breaks_both_ends_of_it() -> None:
    carrying: list[asyncio.Task[None]] = []

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        carrying.extend(relay._tasks)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with server(hang_up) as address, Relay(address) as relay, caller(relay.address) as (reader, writer):
        writer.write(bytes(MIB))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert await asyncio.gather(*carrying) == [None]


async def test_leaving_ends_what_goes_through() -> None:
    async with server(echo) as address:
        async with Relay(address) as relay:
            where = Address.parse(relay.address)
            reader, writer = await asyncio.open_connection(where.host, where.port)
            writer.write(b"before")
            assert await reader.readexactly(6) == b"before"
        with pytest.raises(ConnectionResetError):
            await reader.read()
        await closed(writer)


@pytest.mark.parametrize("name", ["latency_s", "jitter_s", "bytes_per_s", "slice_bytes"])
def test_conditions_are_not_negative(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} of a link must not be negative, got -1"):
        Conditions(**{name: -1})
