"""Ranks that watch each other: which rank watches which, and what a broken call means to the others."""

import asyncio

import grpc
import pytest

from shardnet.pb import mesh_pb2
from shardnet.topology import Member, Topology
from shardnet.transport.hello import ACCEPTED
from shardnet.transport.vigil import ATTEND, watchers_of
from shardnet.wire import Chunk
from tests.shared_loop import on_shared_loop
from tests.transport.puppet import Theatre, theatre


def topology(rank: int, nodes: list[int]) -> Topology:
    return Topology(1, rank, tuple(Member(each, 0, node, f"127.0.0.1:{each + 1}", f"node {node}", "") for each, node in enumerate(nodes)))


@pytest.mark.parametrize(
    ("nodes", "watchers"),
    [
        ([0], [[]]),
        ([0, 0], [[1], [0]]),
        ([0, 1], [[1], [0]]),
        ([0, 0, 0], [[1], [2], [0]]),
        ([0, 0, 1, 1], [[1, 2], [2], [3, 0], [0]]),
        ([0, 1, 0], [[1], [2], [0, 1]]),
    ],
)
def test_each_is_watched_by_the_next_one_and_by_another_node(nodes: list[int], watchers: list[list[int]]) -> None:
    assert [watchers_of(topology(rank, nodes)) for rank in range(len(nodes))] == watchers


Attendance = grpc.aio.UnaryStreamCall[mesh_pb2.AttendRequest, mesh_pb2.AttendReply]


def attend(stage: Theatre, metadata: grpc.aio.Metadata) -> Attendance:
    method: grpc.aio.UnaryStreamMultiCallable[mesh_pb2.AttendRequest, mesh_pb2.AttendReply] = stage.channel.unary_stream(
        ATTEND,
        request_serializer=mesh_pb2.AttendRequest.SerializeToString,
        response_deserializer=mesh_pb2.AttendReply.FromString,
    )
    return method(mesh_pb2.AttendRequest(), metadata=metadata)


async def attending(stage: Theatre) -> Attendance:
    """Rank 1, once rank 0 watches it."""
    call = attend(stage, grpc.aio.Metadata(*stage.hello.metadata()))
    assert ACCEPTED in tuple(await call.initial_metadata() or ())
    return call


class Beliefs:
    """What rank 0 thinks of rank 1, as it changes."""

    def __init__(self, stage: Theatre, monkeypatch: pytest.MonkeyPatch) -> None:
        self.news = asyncio.Queue[str]()
        for name in ("suspect", "trust"):
            monkeypatch.setattr(stage.mesh._outboxes[1], name, lambda name=name: self.news.put_nowait(name))

    async def next(self) -> str:
        async with asyncio.timeout(5.0):
            return await self.news.get()


@on_shared_loop
async def test_a_broken_call_is_a_suspicion_until_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none after the rank has said goodbye."""
    async with theatre() as stage:
        beliefs = Beliefs(stage, monkeypatch)
        first = await attending(stage)
        first.cancel()
        assert await beliefs.next() == "suspect"
        second = await attending(stage)
        assert await beliefs.next() == "trust"
        await stage.send(Chunk(1, 0, 0, control=mesh_pb2.Control(goodbye=mesh_pb2.Goodbye())))
        await stage.mesh._wait(lambda: 1 in stage.mesh._departed, 5.0)
        second.cancel()
        await stage.mesh._wait(lambda: not stage.mesh.attending[1], 5.0)
        assert beliefs.news.empty()


@on_shared_loop
async def test_the_next_call_may_come_before_the_last_one_is_found_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    async with theatre() as stage:
        beliefs = Beliefs(stage, monkeypatch)
        calls = [await attending(stage), await attending(stage)]
        calls[0].cancel()
        await stage.mesh._wait(lambda: stage.mesh.attending[1] == 1, 5.0)
        assert beliefs.news.empty()
        calls[1].cancel()
        assert await beliefs.next() == "suspect"


@on_shared_loop
async def test_what_others_say_is_believed_of_ranks_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async with theatre() as stage:
        beliefs = Beliefs(stage, monkeypatch)
        for rank, gone in ((1, True), (0, True), (77, True), (1, False)):
            said = mesh_pb2.Control(suspicion=mesh_pb2.Suspicion(rank=rank, gone=gone))
            await stage.send(Chunk(1, 0, 0, control=said))
        assert [await beliefs.next(), await beliefs.next()] == ["suspect", "trust"]
        assert beliefs.news.empty()


@on_shared_loop
async def test_strangers_are_refused() -> None:
    async with theatre() as stage:
        assert await attend(stage, grpc.aio.Metadata()).code() is grpc.StatusCode.INVALID_ARGUMENT
        wrong = grpc.aio.Metadata(*((key, "5" if key == "shardnet-source" else value) for key, value in stage.hello.metadata()))
        refused = attend(stage, wrong)
        assert await refused.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "the caller says that it is rank 5, but it is not" in (await refused.details() or "")
