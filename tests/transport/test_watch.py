"""A stream of statistics: which callers may have one, what happens with too many, and how it ends."""

import asyncio
import math
import socket
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

import grpc
import pytest

from shardnet.address import Address
from shardnet.config import MIB, Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable, ProtocolError
from shardnet.pb import stats_pb2
from shardnet.transport import stats_service, watching
from shardnet.transport.dialing import dial
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.http2 import Call
from shardnet.transport.metrics_port import MetricsPort
from shardnet.transport.observe import snapshot
from shardnet.transport.stats_service import MAX_WATCHERS
from shardnet.transport.watching import watch
from tests.shared_loop import on_shared_loop


class Counter:
    """A process that says how often it was asked."""

    def __init__(self, size: int = 0) -> None:
        """size  of each answer, in bytes"""
        self.asked = 0
        self._filling = size * "x"

    def snapshot(self) -> stats_pb2.SnapshotReply:
        self.asked += 1
        return stats_pb2.SnapshotReply(role="test", step=self.asked, routing=self._filling)


def endpoint(counter: Counter) -> Endpoint:
    return Endpoint("127.0.0.1:0", limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=counter.snapshot)


@on_shared_loop
async def test_one_that_is_too_large_is_not_read() -> None:
    """Who watches many, as a rendezvous with a page, would be held up by one of them."""
    async with endpoint(Counter(size=MIB)) as opened, aclosing(watch(opened.address)) as snapshots:
        with pytest.raises(ProtocolError, match="is larger than allowed"):
            await anext(snapshots)


@on_shared_loop
async def test_snapshots_come_at_once_and_then_at_the_interval() -> None:
    async with endpoint(Counter()) as opened:
        told: list[tuple[int, float]] = []
        async with aclosing(watch(opened.address, interval_s=0.1)) as snapshots:
            async for each in snapshots:
                told.append((each.step, time.monotonic()))
                assert not each.serving
                if len(told) == 5:
                    break
        assert [step for step, _ in told] == [1, 2, 3, 4, 5]
        assert told[-1][1] - told[0][1] > 0.3, "four intervals"


@on_shared_loop
async def test_a_watcher_that_has_gone_costs_nothing() -> None:
    counter = Counter()
    async with endpoint(counter) as opened:
        async with aclosing(watch(opened.address, interval_s=0.1)) as snapshots:
            await anext(snapshots)
        while opened._stats._watchers:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        before = counter.asked
        await snapshot(opened.address)
        assert counter.asked == before + 1


@on_shared_loop
async def test_any_client_gets_the_same() -> None:
    async with endpoint(Counter()) as opened, grpc.aio.insecure_channel(opened.address) as channel:
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/shardnet.v1.Stats/Watch")
        call = ask(stats_pb2.WatchRequest(interval_s=0.1).SerializeToString())
        replies = [await call.read() for _ in range(3)]
        assert [stats_pb2.SnapshotReply.FromString(each).step for each in replies if isinstance(each, bytes)] == [1, 2, 3]
        call.cancel()


@on_shared_loop
async def test_who_reads_slowly_gets_the_newest() -> None:
    counter = Counter()
    async with endpoint(counter) as opened, aclosing(watch(opened.address, interval_s=0.1)) as snapshots:
        assert (await anext(snapshots)).step == 1
        while counter.asked < 5:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        assert (await anext(snapshots)).step in (4, 5)


@on_shared_loop
async def test_a_watcher_that_is_frozen_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_service, "_ONLOOKERS", replace(Timeouts(), suspect_s=0.4, lost_s=0.4))
    async with endpoint(Counter()) as opened:
        connection = await dial(Address.parse(opened.address), Security())
        frozen = Call(connection, Limits())
        frozen.open(opened.address, stats_service.PATH, ())
        frozen.send_now(stats_pb2.WatchRequest(interval_s=60.0).SerializeToString())
        frozen.end()
        await frozen.headers()
        asyncio.get_running_loop().remove_reader(connection.socket)
        assert opened._stats._watchers == 1
        async with asyncio.timeout(5.0):
            while opened._stats._watchers:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        frozen.close()


@on_shared_loop
async def test_for_a_watcher_that_takes_nothing_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots that its kernel no longer takes would pile up here. Another watcher, which takes all of them, counts them."""
    monkeypatch.setattr(watching, "_LIMITS", Limits())  # so that few snapshots fill a socket
    counter, told = Counter(size=4 * MIB), 0
    async with endpoint(counter) as opened:
        connection = await dial(Address.parse(opened.address), Security())
        mute = Call(connection, Limits())
        mute.open(opened.address, stats_service.PATH, ())
        mute.send_now(stats_pb2.WatchRequest(interval_s=0.1).SerializeToString())
        mute.end()
        asyncio.get_running_loop().remove_reader(connection.socket)
        async with aclosing(watch(opened.address, interval_s=0.1)) as snapshots:
            async for _ in snapshots:
                told += 1
                if told == 12:
                    break
        assert counter.asked - told < 6, "a socket takes a few"
        mute.close()


@on_shared_loop
async def test_a_snapshot_that_fails_ends_the_stream(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> stats_pb2.SnapshotReply:
        raise ValueError("a secret")

    opened = Endpoint("127.0.0.1:0", limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=fail)
    async with opened, AsyncExitStack() as stack:
        snapshots = await stack.enter_async_context(aclosing(watch(opened.address)))
        with pytest.raises(ProtocolError, match="INTERNAL: internal error; see the log of the process that was called"):
            await anext(snapshots)
    assert "a snapshot failed" in caplog.text


@on_shared_loop
async def test_our_own_way_refuses_as_grpcio_does() -> None:
    async with endpoint(Counter()) as opened, aclosing(watch(opened.address, interval_s=0.01)) as snapshots:
        with pytest.raises(ProtocolError, match=r"INVALID_ARGUMENT: interval_s must be 0\.1 to 60 seconds, got 0\.01"):
            await anext(snapshots)


@on_shared_loop
async def test_somebody_else_answers() -> None:
    """The other server does not speak HTTP/2."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as web:
        web.setblocking(False)
        async with aclosing(watch(f"127.0.0.1:{web.getsockname()[1]}")) as snapshots:
            first = asyncio.ensure_future(anext(snapshots))
            caller, _ = await loop.sock_accept(web)
            with caller:
                await loop.sock_sendall(caller, b"HTTP/1.1 400 Bad Request\r\n\r\n")
                with pytest.raises(ProtocolError, match=r"answered /shardnet\.v1\.Stats/Watch with bytes that are not a valid reply"):
                    await first


@on_shared_loop
async def test_the_port_of_a_page_is_no_processs_own() -> None:
    async with MetricsPort("127.0.0.1:0", stats_pb2.SnapshotReply) as port:
        with pytest.raises(ProtocolError, match="speaks HTTP/1 and not gRPC; it may be the process's port for a page or for metrics"):
            await snapshot(port.url.removeprefix("http://").removesuffix("/metrics"))


@pytest.mark.parametrize("interval_s", [0.0, 0.09, 60.1, -1.0, math.inf, math.nan])
@on_shared_loop
async def test_an_interval_that_is_none(interval_s: float) -> None:
    async with endpoint(Counter()) as opened, grpc.aio.insecure_channel(opened.address) as channel:
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/shardnet.v1.Stats/Watch")
        with pytest.raises(grpc.aio.AioRpcError, match=r"interval_s must be 0\.1 to 60 seconds, got") as caught:
            await ask(stats_pb2.WatchRequest(interval_s=interval_s).SerializeToString()).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@on_shared_loop
async def test_a_request_that_is_none() -> None:
    async with endpoint(Counter()) as opened, grpc.aio.insecure_channel(opened.address) as channel:
        ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/shardnet.v1.Stats/Watch")
        with pytest.raises(grpc.aio.AioRpcError, match="the request is not a valid WatchRequest message"):
            await ask(b"\xff").read()


@on_shared_loop
async def test_so_many_watchers_and_no_more_until_one_has_gone() -> None:
    async with endpoint(Counter()) as opened:
        watchers = [watch(opened.address, interval_s=60.0) for _ in range(MAX_WATCHERS + 1)]
        try:
            for each in watchers[:-1]:
                await anext(each)
            with pytest.raises(ProtocolError, match=f"RESOURCE_EXHAUSTED: this process already has {MAX_WATCHERS} watchers"):
                await anext(watchers[-1])
            await watchers.pop(0).aclose()
            while opened._stats._watchers == MAX_WATCHERS:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0)
            async with aclosing(watch(opened.address)) as late:
                assert (await anext(late)).role == "test"
        finally:
            for each in watchers:
                await each.aclose()


@on_shared_loop
async def test_it_ends_when_the_process_closes_which_does_not_wait_for_it() -> None:
    async with endpoint(Counter()) as opened, aclosing(watch(opened.address, interval_s=60.0)) as snapshots:
        await anext(snapshots)
        async with asyncio.timeout(5.0):
            await opened.aclose(grace_s=60.0)
        with pytest.raises(StopAsyncIteration):
            await anext(snapshots)


@on_shared_loop
async def test_nobody_there() -> None:
    async with aclosing(watch("127.0.0.1:1")) as snapshots:
        with pytest.raises(EndpointUnavailable, match="is not available"):
            await anext(snapshots)
