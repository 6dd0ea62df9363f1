"""One port: health, statistics, and clear errors if the port is not available."""

import asyncio
import logging
import socket
from collections.abc import Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardnet.config import KIB, Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import AddressError, EndpointUnavailable, ListenError, PlaintextRefused, ProtocolError, StateError
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.handlers import Context, stream, unary
from shardnet.transport.observe import Health, ask, health, snapshot
from shardnet.transport.options import channel_options, server_options
from tests.shared_loop import on_shared_loop
from tests.transport.handshakes import BRIEF_S, be_impatient

TIMEOUTS = Timeouts.for_tests()
LIMITS = Limits()
REPLY = stats_pb2.SnapshotReply(role="test", step=7)


def endpoint(
    listen: str = "127.0.0.1:0", *, snapshot: Callable[[], stats_pb2.SnapshotReply] = lambda: REPLY, security: Security | None = None
) -> Endpoint:
    return Endpoint(listen, limits=LIMITS, timeouts=TIMEOUTS, snapshot=snapshot, security=security)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0", "127.0.0.2:0"])
@on_shared_loop
async def test_answers_where_it_listens(listen: str) -> None:
    async with endpoint(listen) as opened:
        host, _, port = opened.address.rpartition(":")
        assert host == listen.rpartition(":")[0]
        assert 0 < int(port) < 65536
        assert await snapshot(opened.address) == REPLY


@on_shared_loop
async def test_serving_is_what_the_owner_says() -> None:
    async with endpoint() as opened:
        assert await health(opened.address) is Health.NOT_SERVING
        opened.set_serving(True)
        assert await health(opened.address) is Health.SERVING
        opened.set_serving(False)
        assert await health(opened.address) is Health.NOT_SERVING


@on_shared_loop
async def test_watchers_are_told_of_changes_and_of_the_end() -> None:
    status = health_pb2.HealthCheckResponse
    async with endpoint() as opened, Security().channel(opened.address, channel_options(TIMEOUTS, LIMITS)) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == status.NOT_SERVING
        opened.set_serving(True)
        assert (await watch.read()).status == status.SERVING
        closing = asyncio.create_task(opened.aclose())
        assert (await watch.read()).status == status.NOT_SERVING
        watch.cancel()
        await closing


@on_shared_loop
async def test_a_question_after_health_that_cannot_be_read() -> None:
    """Without our code the library would answer with the class of a Python exception."""
    async with endpoint() as opened:
        channel = grpc.aio.insecure_channel(opened.address)
        check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
        watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream("/grpc.health.v1.Health/Watch")
        for answer in (check(b"\xff"), watch(b"\xff").read()):
            with pytest.raises(grpc.aio.AioRpcError, match="the request is not a valid HealthCheckRequest message") as caught:
                await answer
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await channel.close()


@on_shared_loop
async def test_port_in_use_names_the_address_and_what_to_do() -> None:
    async with endpoint() as first:
        second = endpoint(first.address)
        with pytest.raises(ListenError, match=f"cannot listen on {first.address}: another process already listens there; .* use port 0"):
            await second.start()
        await second.aclose()
        assert await snapshot(first.address) == REPLY  # the first one keeps it


@pytest.mark.parametrize(
    ("listen", "text"),
    [("192.0.2.1:0", "this machine does not have the address"), ("nobody.invalid:0", "the host name cannot be resolved")],
)
@on_shared_loop
async def test_address_that_is_none_of_ours(listen: str, text: str) -> None:
    with pytest.raises(ListenError, match=f"cannot listen on {listen}: {text}"):
        await endpoint(listen, security=Security(insecure=True)).start()


def test_what_is_wrong_before_anything_opens() -> None:
    with pytest.raises(AddressError):
        endpoint("7000")
    with pytest.raises(PlaintextRefused):
        endpoint("0.0.0.0:0")


@on_shared_loop
async def test_all_interfaces_by_explicit_choice(caplog: pytest.LogCaptureFixture) -> None:
    async with endpoint("0.0.0.0:0", security=Security(insecure=True)) as opened:
        assert await snapshot(f"127.0.0.1:{opened.address.rpartition(':')[2]}") == REPLY


@on_shared_loop
async def test_order_of_life() -> None:
    opened = endpoint()
    with pytest.raises(StateError, match="no port before"):
        _ = opened.address
    await opened.start()
    with pytest.raises(StateError, match="services must be added before"):
        opened.add()
    with pytest.raises(StateError, match="make a new one"):
        await opened.start()
    address = opened.address
    await opened.aclose()
    await opened.aclose()
    with pytest.raises(StateError, match="make a new one"):
        await opened.start()
    async with endpoint(address) as again:  # the port is free at once
        assert again.address == address


@on_shared_loop
async def test_a_start_may_be_cancelled_at_any_moment() -> None:
    """It is cancelled while it binds, and at each turn of the loop while grpcio starts. The guards see that nothing is left of it."""
    for turns in range(-3, 10):
        opened = endpoint()
        starting = asyncio.create_task(opened.start())
        while opened._door is None and turns >= 0:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0)
        for _ in range(abs(turns)):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        await opened.aclose()


@on_shared_loop
async def test_failing_snapshot_stays_inside(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> stats_pb2.SnapshotReply:
        raise RuntimeError("a secret path")

    async with endpoint(snapshot=fail) as opened:
        with pytest.raises(ProtocolError, match="INTERNAL: internal error; see the log") as caught:
            await snapshot(opened.address)
        assert "secret" not in str(caught.value)
    assert "a secret path" in caplog.text
    caplog.clear()  # the traceback in the record keeps the call alive, and with it its socket


class TestCallsUnderWay:
    """What closing does to calls that are being answered."""

    @on_shared_loop
    async def test_call_that_ends_in_time_is_answered(self) -> None:
        entered, release = asyncio.Event(), asyncio.Event()

        async def slow(_: stats_pb2.SnapshotRequest, __: Context[stats_pb2.SnapshotReply]) -> stats_pb2.SnapshotReply:
            entered.set()
            await release.wait()
            return REPLY

        opened = endpoint()
        opened.add(grpc.method_handlers_generic_handler("test.Slow", {"Call": unary(stats_pb2.SnapshotRequest, slow)}))
        async with opened:
            call = asyncio.create_task(
                ask(opened.address, "/test.Slow/Call", stats_pb2.SnapshotRequest(), stats_pb2.SnapshotReply.FromString, timeout_s=10.0)
            )
            await entered.wait()
            closing = asyncio.create_task(opened.aclose(grace_s=10.0))
            await asyncio.sleep(0)
            release.set()
            assert await call == REPLY
            await closing

    @pytest.mark.parametrize("cancel", [False, True])
    @on_shared_loop
    async def test_call_that_does_not_end_is_cut(self, cancel: bool) -> None:
        entered, cut = asyncio.Event(), asyncio.Event()

        async def endless(_: stats_pb2.SnapshotRequest, __: Context[stats_pb2.SnapshotReply]) -> None:
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                cut.set()

        opened = endpoint()
        opened.add(grpc.method_handlers_generic_handler("test.Endless", {"Call": stream(stats_pb2.SnapshotRequest, endless)}))
        async with opened, Security().channel(opened.address, channel_options(TIMEOUTS, LIMITS)) as channel:
            call = channel.unary_stream("/test.Endless/Call", request_serializer=bytes, response_deserializer=bytes)(b"")
            await entered.wait()
            closing = asyncio.create_task(opened.aclose(grace_s=60.0 if cancel else 0.1))
            if cancel:
                await asyncio.sleep(0.05)
                closing.cancel()
            await asyncio.wait({closing})
            assert closing.cancelled() is cancel
            assert cut.is_set()
            call.cancel()


class TestObserving:
    @on_shared_loop
    async def test_nobody_there(self) -> None:
        async with endpoint() as opened:
            address = opened.address
        with pytest.raises(
            EndpointUnavailable, match=f"^{address} is not available: Connection refused; check the address and that the process runs$"
        ):
            await snapshot(address, timeout_s=5.0)

    @on_shared_loop
    async def test_server_that_never_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(EndpointUnavailable, match=f"{address} did not answer .* in time"):
                await health(address, timeout_s=0.3)

    @on_shared_loop
    async def test_service_that_is_not_there(self) -> None:
        async with endpoint() as opened:
            with pytest.raises(ProtocolError, match="it is not a shardnet process"):
                await ask(opened.address, "/x.Y/Z", stats_pb2.SnapshotRequest(), bytes, timeout_s=5.0)

    @on_shared_loop
    async def test_answer_that_is_something_else(self) -> None:
        async with endpoint() as opened:
            method = "/shardnet.v1.Stats/Snapshot"
            with pytest.raises(ProtocolError, match="bytes that are not a valid reply"):
                await ask(opened.address, method, stats_pb2.SnapshotRequest(), _unreadable, timeout_s=5.0)

    @on_shared_loop
    async def test_plaintext_off_this_machine(self) -> None:
        with pytest.raises(PlaintextRefused):
            await snapshot("192.0.2.1:7000")


def _unreadable(data: bytes) -> stats_pb2.SnapshotReply:
    return stats_pb2.SnapshotReply.FromString(b"\xff" + data)


class TestOptions:
    """Each of these has its failure described beside it in options.py."""

    def test_ping_timeout_equals_keepalive_timeout(self) -> None:
        for options in (dict(channel_options(Timeouts(), Limits())), dict(server_options(Timeouts(), Limits()))):
            assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 2000
            assert options["grpc.keepalive_time_ms"] == 1000

    @pytest.mark.parametrize("suspect_s", [0.2, 2.0, 30.0])
    def test_server_allows_the_pings_that_our_channels_send(self, suspect_s: float) -> None:
        timeouts = Timeouts(suspect_s=suspect_s)
        pings = dict(channel_options(timeouts, Limits()))["grpc.keepalive_time_ms"]
        allowed = dict(server_options(timeouts, Limits()))["grpc.http2.min_ping_interval_without_data_ms"]
        assert int(allowed) <= int(pings)

    @on_shared_loop
    async def test_idle_connection_survives_its_own_pings(self) -> None:
        """A default server hangs up at the third ping, 3 s after the start."""
        async with endpoint() as opened, Security().channel(opened.address, channel_options(TIMEOUTS, LIMITS)) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            with pytest.raises(TimeoutError):  # nothing comes, not even the end
                async with asyncio.timeout(3.5):
                    await watch.read()

    @on_shared_loop
    async def test_connection_that_says_nothing_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The handshake timeout or keepalive closes it: without both it would stay for ever."""
        be_impatient(monkeypatch)
        loop = asyncio.get_running_loop()
        async with endpoint() as opened:
            host, _, port = opened.address.rpartition(":")
            with socket.create_connection((host, int(port))) as silent:
                silent.setblocking(False)
                async with asyncio.timeout(BRIEF_S + 2):
                    while await loop.sock_recv(silent, 4096):  # what the server says first does not matter
                        pass

    def test_message_limit_is_the_configured_one(self) -> None:
        limits = Limits(max_message_bytes=4096 * KIB)
        for options in (dict(channel_options(Timeouts(), limits)), dict(server_options(Timeouts(), limits))):
            assert options["grpc.max_receive_message_length"] == options["grpc.max_send_message_length"] == 4096 * KIB


def test_nothing_is_logged_above_info_in_an_ordinary_life(caplog: pytest.LogCaptureFixture) -> None:
    @on_shared_loop
    async def live() -> None:
        async with endpoint() as opened:
            opened.set_serving(True)
            await snapshot(opened.address)

    live()
    assert [r.getMessage() for r in caplog.records if r.levelno > logging.INFO] == []
