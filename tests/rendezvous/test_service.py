"""The service as a stranger sees it: raw gRPC, right and wrong."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from shardnet.config import Limits
from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable, ListenError, PlaintextRefused
from shardnet.pb import rendezvous_pb2 as pb
from shardnet.rendezvous import messages
from shardnet.rendezvous.client import status
from shardnet.rendezvous.events import JobState
from shardnet.rendezvous.server import RendezvousServer
from shardnet.transport.observe import Health, health, snapshot
from shardnet.transport.options import channel_options
from tests.rendezvous.builders import worker
from tests.rendezvous.people import TIMEOUTS, people, rendezvous
from tests.shared_loop import on_shared_loop

LEAKS = ("Traceback", "Error", ".py", "shardnet.", "<class", "self")  # of Python, in a message for a caller


@asynccontextmanager
async def stranger() -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a rendezvous."""
    async with rendezvous() as server, Security().channel(server.address, channel_options(TIMEOUTS, Limits())) as channel:
        yield channel


async def failure(call: "grpc.aio.UnaryStreamCall[bytes, bytes] | grpc.aio.UnaryUnaryCall[bytes, bytes]") -> grpc.aio.AioRpcError:
    """How the call ends; neither its text nor its type shows the inside."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call.read() if isinstance(call, grpc.aio.UnaryStreamCall) else call)
    details = caught.value.details()
    assert details
    assert not any(leak in details for leak in LEAKS), details
    return caught.value


def _same(data: bytes) -> bytes:
    return data


def join_message(**change: object) -> bytes:
    message = messages.write_request(worker(0))
    for name, value in change.items():
        setattr(message, name, value)
    return message.SerializeToString()


@pytest.mark.parametrize(
    ("data", "code", "text"),
    [
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "the request is not a valid JoinRequest message"),
        (b"", grpc.StatusCode.FAILED_PRECONDITION, "speaks protocol 0"),
        (join_message(protocol=2), grpc.StatusCode.FAILED_PRECONDITION, "install the same version"),
        (join_message(job=""), grpc.StatusCode.INVALID_ARGUMENT, "job must not be empty"),
        (join_message(job="x" * 1000), grpc.StatusCode.INVALID_ARGUMENT, "at most 256"),
        (join_message(node="\x1b[2J"), grpc.StatusCode.INVALID_ARGUMENT, "cannot be printed"),
        (join_message(address="no port"), grpc.StatusCode.INVALID_ARGUMENT, "does not end in a port"),
        (join_message(address="0.0.0.0:1"), grpc.StatusCode.INVALID_ARGUMENT, "peers cannot call"),
        (join_message(min_world_size=0), grpc.StatusCode.INVALID_ARGUMENT, "asked for 0 to 2 workers"),
        (join_message(max_world_size=2**32 - 1), grpc.StatusCode.INVALID_ARGUMENT, "<= 65536"),
        (join_message(max_world_size=5000), grpc.StatusCode.RESOURCE_EXHAUSTED, "takes at most 4096"),
    ],
)
@on_shared_loop
async def test_wrong_join_requests(data: bytes, code: grpc.StatusCode, text: str) -> None:
    async with stranger() as channel:
        error = await failure(
            channel.unary_stream(f"/{messages.SERVICE}/Join", request_serializer=_same, response_deserializer=_same)(data)
        )
        assert error.code() is code
        assert text in (error.details() or "")


@pytest.mark.parametrize("method", ["Leave", "Fail", "Status"])
@on_shared_loop
async def test_bytes_that_are_no_message(method: str) -> None:
    async with stranger() as channel:
        error = await failure(
            channel.unary_unary(f"/{messages.SERVICE}/{method}", request_serializer=_same, response_deserializer=_same)(b"\xff")
        )
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a valid {method}Request message")


@on_shared_loop
async def test_leaving_as_nobody_is_nothing() -> None:
    async with stranger() as channel:
        leave = channel.unary_unary(f"/{messages.SERVICE}/Leave", request_serializer=_same, response_deserializer=_same)
        assert await leave(pb.LeaveRequest(job="x", incarnation="y").SerializeToString()) == b""


@on_shared_loop
async def test_goodbye_ends_the_lease() -> None:
    async with stranger() as channel:
        join = channel.unary_stream(f"/{messages.SERVICE}/Join", request_serializer=_same, response_deserializer=_same)
        leave = channel.unary_unary(f"/{messages.SERVICE}/Leave", request_serializer=_same, response_deserializer=_same)
        lease = join(join_message())
        first = await lease.read()
        assert isinstance(first, bytes)
        assert pb.MembershipEvent.FromString(first).waiting.joined == 1
        await leave(pb.LeaveRequest(job="job", incarnation="w0").SerializeToString())
        assert await lease.read() is grpc.aio.EOF
        assert await lease.code() is grpc.StatusCode.OK


@on_shared_loop
async def test_a_failure_ends_the_lease_and_its_reason_stays_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shardnet.rendezvous")
    async with stranger() as channel:
        join = channel.unary_stream(f"/{messages.SERVICE}/Join", request_serializer=_same, response_deserializer=_same)
        fail = channel.unary_unary(f"/{messages.SERVICE}/Fail", request_serializer=_same, response_deserializer=_same)
        lease = join(join_message(min_world_size=1, max_world_size=1))
        assert isinstance(await lease.read(), bytes)
        await fail(pb.FailRequest(job="job", incarnation="w0", why="its disk\nis full").SerializeToString())
        while await lease.read() is not grpc.aio.EOF:
            pass
        assert await lease.code() is grpc.StatusCode.OK
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-2] == r"job job: 10.0.0.1:7000 is gone: its disk\nis full"
    assert lines[-1].endswith(r"; epoch 1 lost rank 0 (10.0.0.1:7000) first: its disk\nis full")


@on_shared_loop
async def test_message_beyond_the_limit_is_refused_unread() -> None:
    async with stranger() as channel:
        call = channel.unary_stream(f"/{messages.SERVICE}/Join", request_serializer=_same, response_deserializer=_same)
        error = await failure(call(bytes(Limits().max_message_bytes + 1)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@on_shared_loop
async def test_status_health_and_statistics_on_the_one_port() -> None:
    async with rendezvous() as server, people(server.address, worker(0, job="a"), worker(1, job="b"), worker(2, job="b")) as persons:
        await persons[2].joined
        assert [(s.job, s.state, s.epoch, s.joined) for s in await status(server.address)] == [
            ("a", JobState.FORMING, 0, 1),
            ("b", JobState.RUNNING, 1, 2),
        ]
        (running,) = await status(server.address, "b")
        assert [m.address for m in running.members] == ["10.0.0.1:7001", "10.0.0.1:7002"]
        assert await status(server.address, "c") == ()
        assert await health(server.address) is Health.SERVING
        reply = await snapshot(server.address)
        assert reply.role == "rendezvous"
        assert reply.uptime_s > 0
        assert reply.resident_bytes > 2**20


@on_shared_loop
async def test_closing_is_final_and_may_be_repeated() -> None:
    server = rendezvous()
    await server.start()
    address = server.address
    await server.aclose()
    await server.aclose()
    with pytest.raises(EndpointUnavailable, match=f"^{address} is not available"):
        await status(address, timeout_s=2.0)


@on_shared_loop
async def test_port_that_is_taken() -> None:
    async with rendezvous() as server:
        second = rendezvous(server.address)
        with pytest.raises(ListenError, match=f"cannot listen on {server.address}: another process already listens there"):
            await second.start()
        await second.aclose()


def test_plaintext_beyond_loopback_needs_a_choice() -> None:
    with pytest.raises(PlaintextRefused, match="insecure=True"):
        RendezvousServer("0.0.0.0:7000")
