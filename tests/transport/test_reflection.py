"""Server reflection: off unless it is switched on, and then what tools expect."""

import sys

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shardnet.config import Limits, Timeouts
from shardnet.errors import UsageError
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint
from tests.shared_loop import on_shared_loop

INFO = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
Ask = reflection_pb2.ServerReflectionRequest


def endpoint(reflection: bool = True) -> Endpoint:
    return Endpoint("127.0.0.1:0", limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=stats_pb2.SnapshotReply, reflection=reflection)


@on_shared_loop
async def test_services_and_their_messages_can_be_asked_for() -> None:
    async with endpoint() as opened, grpc.aio.insecure_channel(opened.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([Ask(list_services=""), Ask(file_containing_symbol="shardnet.v1.Stats"), Ask(file_by_filename="nothing"), Ask()])
        )
        services, file, unknown, empty = [reply async for reply in call]
    names = [each.name for each in services.list_services_response.service]
    assert names == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection", "shardnet.v1.Stats"]
    found = descriptor_pb2.FileDescriptorProto.FromString(file.file_descriptor_response.file_descriptor_proto[0])
    assert [method.name for method in found.service[0].method] == ["Snapshot", "Watch"]
    assert unknown.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert empty.error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


@on_shared_loop
async def test_a_question_that_cannot_be_read() -> None:
    async with endpoint() as opened, grpc.aio.insecure_channel(opened.address) as channel:
        ask: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(INFO)
        with pytest.raises(grpc.aio.AioRpcError, match="the request is not a valid ServerReflectionRequest message") as caught:
            await ask(iter([b"\xff"])).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@on_shared_loop
async def test_it_is_off_by_default() -> None:
    async with endpoint(reflection=False) as opened, grpc.aio.insecure_channel(opened.address) as channel:
        ask: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(INFO)
        assert await ask().code() is grpc.StatusCode.UNIMPLEMENTED  # what is sent to who has refused already fails otherwise


@on_shared_loop
async def test_a_caller_that_leaves_in_the_middle_leaves_nothing() -> None:
    async with endpoint() as opened, grpc.aio.insecure_channel(opened.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(Ask(list_services=""))
        await call.read()
        call.cancel()


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_reflection.v1alpha", None)
    with pytest.raises(UsageError, match=r"install shardnet\[reflection\], or leave it off"):
        endpoint()
    endpoint(reflection=False)
