"""A stream of statistics: who may have one, what it costs to have too many, and how it ends."""

import asyncio
import math
import time
from contextlib import aclosing

import grpc
import pytest

from shardnet.config import Limits, Timeouts
from shardnet.errors import EndpointUnavailable, ProtocolError
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.observe import snapshot, watch
from shardnet.transport.stats_service import MAX_WATCHERS
from tests.shared_loop import on_shared_loop


class Counter:
    """A process that says how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def snapshot(self) -> stats_pb2.SnapshotReply:
        self.asked += 1
        return stats_pb2.SnapshotReply(role="test", step=self.asked)


def endpoint(counter: Counter) -> Endpoint:
    return Endpoint("127.0.0.1:0", limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=counter.snapshot)


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
        with pytest.raises(grpc.aio.AioRpcError, match="the request is no WatchRequest"):
            await ask(b"\xff").read()


@on_shared_loop
async def test_so_many_watchers_and_no_more_until_one_has_gone() -> None:
    async with endpoint(Counter()) as opened:
        watchers = [watch(opened.address, interval_s=60.0) for _ in range(MAX_WATCHERS + 1)]
        try:
            for each in watchers[:-1]:
                await anext(each)
            with pytest.raises(ProtocolError, match=f"RESOURCE_EXHAUSTED: this process has {MAX_WATCHERS} watchers"):
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
        with pytest.raises(EndpointUnavailable, match="nobody answers"):
            await anext(snapshots)
