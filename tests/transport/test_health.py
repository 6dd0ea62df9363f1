"""`grpc.health.v1` as a standard client sees it."""

import asyncio
from typing import cast

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from shardnet.config import Limits, Timeouts
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.handlers import Context
from shardnet.transport.health_service import HealthService
from tests.shared_loop import on_shared_loop

STATUS = health_pb2.HealthCheckResponse
STATS = "shardnet.v1.Stats"


def endpoint() -> Endpoint:
    return Endpoint("127.0.0.1:0", limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=stats_pb2.SnapshotReply)


def question(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", STATS, "grpc.health.v1.Health"])
@on_shared_loop
async def test_the_process_and_its_services_have_one_answer(service: str) -> None:
    async with endpoint() as opened, grpc.aio.insecure_channel(opened.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for serving, status in ((False, STATUS.NOT_SERVING), (True, STATUS.SERVING)):
            opened.set_serving(serving)
            assert (await stub.Check(question(service))).status == status
            watch = stub.Watch(question(service))
            assert (await watch.read()).status == status
            watch.cancel()


@on_shared_loop
async def test_a_service_that_nobody_knows() -> None:
    """As the protocol says: an error for a single check, but a status for a watch, because the service may come."""
    async with endpoint() as opened, grpc.aio.insecure_channel(opened.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(question("shardnet.v1.Rendezvous"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(question("shardnet.v1.Rendezvous"))
        assert (await watch.read()).status == STATUS.SERVICE_UNKNOWN
        watch.cancel()


@on_shared_loop
async def test_a_watcher_that_does_not_read_holds_up_nobody_and_hears_the_newest() -> None:
    async with endpoint() as opened, grpc.aio.insecure_channel(opened.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        idle, reader = stub.Watch(question("")), stub.Watch(question(""))
        assert (await reader.read()).status == STATUS.NOT_SERVING
        for turn in range(100):
            opened.set_serving(turn % 2 == 0)
            opened.set_serving(turn % 2 == 1)
        assert (await reader.read()).status == STATUS.SERVING
        idle.cancel()


@on_shared_loop
async def test_watchers_end_with_the_process_and_do_not_hold_it_up() -> None:
    async with endpoint() as opened, grpc.aio.insecure_channel(opened.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(question(""))
        opened.set_serving(True)
        assert (await watch.read()).status == STATUS.SERVING
        async with asyncio.timeout(5.0):
            await opened.aclose(grace_s=60.0)
        opened.set_serving(True)  # too late
        assert (await watch.read()).status == STATUS.NOT_SERVING
        assert await watch.read() is grpc.aio.EOF
        assert await watch.code() is grpc.StatusCode.OK


async def test_an_end_that_comes_while_a_status_is_written_is_told_too() -> None:
    """Otherwise a watcher would take the process for serving when its call ends."""
    service, told = HealthService(), []

    class Watcher:
        async def write(self, reply: health_pb2.HealthCheckResponse) -> None:
            told.append(reply.status)
            if reply.status == STATUS.SERVING:
                service.close()

    service.set(True)
    await service._watch(question(""), cast("Context[health_pb2.HealthCheckResponse]", Watcher()))
    assert told == [STATUS.SERVING, STATUS.NOT_SERVING]
