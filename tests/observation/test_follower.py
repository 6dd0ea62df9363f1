"""`Follower`: one stream from each process, and what the end of a stream means."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable
from shardnet.observation.follower import Follower
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.stats_service import MAX_WATCHERS
from shardnet.transport.watching import watch
from tests.shared_loop import on_shared_loop


@asynccontextmanager
async def process(listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[Endpoint, list[int]]]:
    """A process that counts how often it is asked."""
    asked: list[int] = []

    def snapshot() -> stats_pb2.SnapshotReply:
        asked.append(len(asked) + 1)
        return stats_pb2.SnapshotReply(role="test", step=len(asked))

    async with Endpoint(listen, limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=snapshot) as endpoint:
        yield endpoint, asked


async def _answers(following: Follower, address: str) -> bool:
    try:
        await following.ask(address)
    except EndpointUnavailable:
        return False
    return True


def follower(interval_s: float = 60.0) -> Follower:
    return Follower(Security(), interval_s, 5.0)


@on_shared_loop
async def test_looking_again_asks_nobody() -> None:
    async with process() as (endpoint, asked), follower() as following:
        assert [(await following.ask(endpoint.address)).step for _ in range(5)] == [1] * 5
        assert len(asked) == 1


@on_shared_loop
async def test_what_is_new_comes_by_itself() -> None:
    async with process() as (endpoint, _), follower(0.1) as following:
        while (await following.ask(endpoint.address)).step < 3:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


@on_shared_loop
async def test_a_process_that_goes_is_gone_at_once_and_one_that_comes_back_is_seen() -> None:
    async with follower() as following:
        async with process() as (endpoint, _):
            address = endpoint.address
            assert (await following.ask(address)).step == 1
        async with asyncio.timeout(5.0):
            while await _answers(following, address):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0)  # `ask` returns what it knows without a pause, in which the stream's end could not come
        with pytest.raises(EndpointUnavailable, match="is not available"):
            await following.ask(address)
        async with process(address):
            assert (await following.ask(address)).role == "test"


@on_shared_loop
async def test_a_process_that_has_watchers_enough_is_asked() -> None:
    async with process() as (endpoint, _), follower() as following:
        watchers = [watch(endpoint.address, interval_s=60.0) for _ in range(MAX_WATCHERS)]
        try:
            for each in watchers:
                await anext(each)
            steps = [(await following.ask(endpoint.address)).step for _ in range(2)]
            assert steps == [MAX_WATCHERS + 1, MAX_WATCHERS + 2]
        finally:
            for each in watchers:
                await each.aclose()


@on_shared_loop
async def test_nothing_is_left() -> None:
    async with process() as (endpoint, _):
        async with follower() as following:
            await following.ask(endpoint.address)
            assert endpoint._stats._watchers == 1
        while endpoint._stats._watchers:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)


@on_shared_loop
async def test_leaving_while_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with follower() as following:
            asking = asyncio.create_task(following.ask(f"127.0.0.1:{mute.getsockname()[1]}"))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            assert asking.cancelled()


@on_shared_loop
async def test_who_is_not_looked_at_any_more_is_not_followed() -> None:
    async with process() as (first, _), process() as (second, _), follower() as following:
        for endpoint in (first, second):
            await following.ask(endpoint.address)
        await following.keep([second.address, "127.0.0.1:1"])
        while first._stats._watchers:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0)
        assert second._stats._watchers == 1
