"""Ranks of one node in a cluster: what goes through memory, and what happens if nothing can."""

import asyncio
import errno
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.config import KIB, MIB, Limits, Timeouts
from shardnet.errors import ClosedError, PeerLost
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.testing import each_error, each_rank, local_cluster
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.http2 import Call
from shardnet.transport.shared_memory import Sharing, sharing, view
from shardnet.transport.shared_memory.window import Window
from shardnet.wire import Chunk

# without letters, otherwise rounds would do all of it
LIMITS = Limits(chunk_bytes=64 * KIB, window_bytes=256 * KIB, inline_bytes=KIB, letter_bytes=0)
ELEMENTS = 240_000


class Wire:
    """Counts the bytes that go over streams."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        send = Call.send

        async def counted(call: Call, *parts: Any) -> None:
            self.bytes += sum(map(len, parts))
            await send(call, *parts)

        monkeypatch.setattr(Call, "send", counted)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    return Wire(monkeypatch)


def mesh_of(backend: ClusterBackend) -> GrpcMesh:
    mesh = backend._board.mesh
    assert isinstance(mesh, GrpcMesh)
    return mesh


async def sums(ranks: Sequence[Backend]) -> None:
    """Run collectives in every way that data can go, and check every byte of the results."""

    async def work(rank: Backend) -> None:
        mine = torch.arange(ELEMENTS, dtype=torch.float32) + rank.rank
        total = torch.stack([torch.arange(ELEMENTS) + each for each in range(rank.world_size)]).sum(0).float()
        assert torch.equal(await rank.all_reduce(mine), total)
        assert torch.equal(await rank.reduce_scatter(mine), total.chunk(rank.world_size)[rank.rank])
        gathered = await rank.all_gather(mine)
        assert all(torch.equal(part, torch.arange(ELEMENTS) + float(each)) for each, part in enumerate(gathered.chunk(rank.world_size)))
        assert torch.equal(await rank.broadcast(mine, 1), torch.arange(ELEMENTS) + 1.0)
        exchanged = await rank.all_to_all(mine)
        part = torch.arange(ELEMENTS, dtype=torch.float32).chunk(rank.world_size)[rank.rank]
        assert torch.equal(exchanged, torch.cat([part + each for each in range(rank.world_size)]))

    await each_rank(ranks, work)


async def test_data_goes_through_memory_and_streams_say_where_it_lies(wire: Wire) -> None:
    async with local_cluster(4, limits=LIMITS) as ranks:
        assert [mesh_of(rank).memory_peers for rank in ranks] == [frozenset(range(4)) - {rank} for rank in range(4)]
        before = wire.bytes
        await sums(ranks)
        sent = sum(rank.telemetry.bytes_sent for rank in ranks)
        assert wire.bytes - before < sent / 100


async def test_memory_stays_inside_a_node(wire: Wire) -> None:
    async with local_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
        assert [mesh_of(rank).memory_peers for rank in ranks] == [{1}, {0}, {3}, {2}]
        await sums(ranks)
        pairs = [rank.subgroup([0, 1] if rank.rank < 2 else [2, 3]) for rank in ranks]
        before = wire.bytes
        await sums(pairs)
        assert wire.bytes - before < ELEMENTS
        before = wire.bytes
        await each_rank([ranks[rank].subgroup([1, 2]) for rank in (1, 2)], lambda rank: rank.all_gather(torch.ones(ELEMENTS)))
        assert wire.bytes - before >= 2 * 4 * ELEMENTS


async def test_many_collectives_at_once_share_a_window_that_is_smaller_than_any() -> None:
    async with local_cluster(3, limits=replace(LIMITS, chunk_bytes=8 * KIB, window_bytes=32 * KIB, eager_bytes=KIB)) as ranks:

        async def work(rank: Backend) -> None:
            handles = [rank.all_reduce(torch.full((30_000,), float(index + rank.rank))) for index in range(12)]
            for index, handle in enumerate(handles):
                assert torch.equal(await handle, torch.full((30_000,), 3.0 * index + 3.0))

        await each_rank(ranks, work)


async def test_without_a_window_everything_goes_over_grpc(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    async with local_cluster(2, shared_memory=False) as ranks:
        assert [mesh_of(rank).memory_peers for rank in ranks] == [frozenset()] * 2
        await sums(ranks)
    assert caplog.records == []  # no warning: that was asked for


@pytest.mark.parametrize(
    ("function", "number"),
    [("posix_fallocate", errno.ENOSPC), ("memfd_create", errno.EPERM), ("memfd_create", errno.ENOSYS)],
    ids=["full", "forbidden", "missing"],
)
async def test_no_memory_is_one_line_in_the_log(
    function: str, number: int, wire: Wire, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, function, fail)
    with caplog.at_level(logging.WARNING):
        async with local_cluster(2, limits=LIMITS) as ranks:
            assert [mesh_of(rank).memory_peers for rank in ranks] == [frozenset()] * 2
            await sums(ranks)
    assert sorted(record.message for record in caplog.records) == [
        f"[rank {rank}/2 epoch 1] no shared memory ([Errno {number}] {os.strerror(number)}): data for the ranks of this node goes over gRPC"
        for rank in range(2)
    ]


async def test_no_mailbox_is_one_line_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """There is memory for windows, but for nothing more."""

    def full(place: int, capacity: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sharing, "Mailbox", full)
    with caplog.at_level(logging.WARNING):
        async with local_cluster(2, limits=replace(LIMITS, letter_bytes=4 * KIB)) as ranks:
            assert [mesh_of(rank).memory_peers for rank in ranks] == [{1}, {0}]
            await sums(ranks)
    assert sorted(record.message for record in caplog.records) == [
        f"[rank {rank}/2 epoch 1] no mailbox ([Errno 28] No space left on device): "
        "collectives inside this node are announced over gRPC, which takes longer"
        for rank in range(2)
    ]


async def test_memory_that_one_rank_does_not_see_is_not_used_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As if rank 2 were in its own container on the same host."""
    find, offers = view._find, []

    def find_but_every_third(offer: mesh_pb2.WindowOffer) -> Any:
        offers.append(offer)
        if offer.secret == offers[0].secret:
            raise OSError("not from here")
        return find(offer)

    monkeypatch.setattr(view, "_find", find_but_every_third)
    with caplog.at_level(logging.WARNING):
        async with local_cluster(3, limits=LIMITS) as ranks:
            assert sorted(len(mesh_of(rank).memory_peers) for rank in ranks) == [0, 2, 2]
            await sums(ranks)
    assert len(caplog.records) == 1
    assert caplog.records[0].message.count("not from here") == 2


async def test_who_waits_for_room_hears_that_a_reader_is_gone() -> None:
    """A frozen reader holds everybody's room until it is lost."""
    timeouts = Timeouts(connect_s=10, suspect_s=0.5, lost_s=1.0, collective_s=15.0, drain_s=0.5)
    async with local_cluster(3, limits=replace(LIMITS, window_bytes=64 * KIB, chunk_bytes=8 * KIB), timeouts=timeouts) as ranks:
        frozen = mesh_of(ranks[2])
        frozen.receive = lambda *_: None  # type: ignore[method-assign]  # it takes nothing, and says nothing
        handles = [rank.all_gather(torch.ones(100_000)) for rank in ranks]
        await asyncio.sleep(0.2)
        assert not any(handle.done() for handle in handles)
        ranks[2].abort()
        for handle in handles[:2]:
            with pytest.raises(PeerLost, match="rank 2"):
                await handle
        with pytest.raises(ClosedError):
            await handles[2]
        rest = [rank.subgroup([0, 1]) for rank in ranks[:2]]
        await sums(rest)
        for rank in ranks[:2]:
            rank.abort()


async def test_a_frozen_rank_holds_up_nobody_else(wire: Wire) -> None:
    """It keeps the room of the data that it was told of, so the others' data goes over their streams."""
    limits = replace(LIMITS, chunk_bytes=8 * KIB, window_bytes=64 * KIB, eager_bytes=KIB)
    async with local_cluster(3, limits=limits, lending=False) as ranks:
        frozen = mesh_of(ranks[2])
        receive, held = frozen.receive, []
        frozen.receive = lambda *what: held.append(what)  # type: ignore[method-assign]  # it comes to nothing
        handles = [rank.all_gather(torch.ones(100_000)) for rank in ranks]
        pair = [rank.subgroup([0, 1]) for rank in ranks[:2]]
        await sums(pair)
        before = wire.bytes
        await sums(pair)
        assert wire.bytes - before > ELEMENTS, "the window should be stuck: this test proved nothing"
        frozen.receive = receive  # type: ignore[method-assign]  # it thaws
        for what in held:
            LoopThread.shared().call(receive, *what)
        for handle in handles:
            assert torch.equal(await handle, torch.ones(300_000))
        await sums(ranks)
        before = wire.bytes
        await sums(pair)
        assert wire.bytes - before < ELEMENTS, "the window should be used again"


async def test_a_rank_that_has_left_holds_no_room(wire: Wire) -> None:
    limits = replace(LIMITS, chunk_bytes=8 * KIB, window_bytes=64 * KIB, eager_bytes=KIB)
    async with local_cluster(3, limits=limits) as ranks:
        pair = [rank.subgroup([0, 1]) for rank in ranks[:2]]
        await each_rank(ranks, lambda rank: rank.all_gather(torch.ones(3000)))  # less than what makes a reader report
        leaving = asyncio.ensure_future(ranks[2].aclose())
        while any(2 in mesh_of(rank).memory_peers for rank in ranks[:2]):  # noqa: ASYNC110 - nobody tells when a goodbye has come
            await asyncio.sleep(0.01)
        before = wire.bytes
        await sums(pair)
        assert wire.bytes - before < ELEMENTS
        await leaving


async def test_an_abort_in_the_middle_leaves_no_piece_behind() -> None:
    """After collectives that failed half way, a window of a few pieces is still reused many times."""
    async with local_cluster(2, limits=replace(LIMITS, chunk_bytes=8 * KIB, window_bytes=32 * KIB, eager_bytes=KIB)) as ranks:
        for _ in range(20):
            await each_error(ranks, lambda rank: rank.all_reduce(torch.ones(20_000 + rank.rank)))
            await each_rank(ranks, lambda rank: rank.all_reduce(torch.ones(20_000)))


async def test_a_window_from_another_node_ends_the_stream() -> None:
    async with local_cluster(2, ranks_per_node=1, limits=LIMITS) as ranks:
        offer = mesh_pb2.WindowOffer(pid=os.getpid(), descriptor=0, capacity=MIB, secret=bytes(32))
        rank0 = ranks[0]._board
        rank0.loop.call(mesh_of(ranks[0])._sharing._post, 1, mesh_pb2.Control(window_offer=offer))
        error = await asyncio.to_thread(ranks[1].all_reduce(torch.ones(1)).exception)
        assert isinstance(error, PeerLost)
        for rank in ranks:
            rank.abort()


async def test_who_leaves_takes_no_room_along(wire: Wire) -> None:
    """Readers say only a few times in each lap what they have read, so a reader that leaves never reports some of it."""
    async with local_cluster(3, limits=LIMITS) as ranks:
        await each_rank(ranks, lambda rank: rank.all_gather(torch.ones(10_000)))
        rest = [rank.subgroup([0, 1]) for rank in ranks[:2]]
        await ranks[2].aclose()
        await sums(rest)
        before = wire.bytes
        await sums(rest)
        assert wire.bytes - before < ELEMENTS, "the window should be used"


async def test_a_rank_that_thaws_when_the_others_have_lost_it_gets_no_wrong_byte() -> None:
    """What it was told waits in its socket, and may be all that its collective needs."""
    async with local_cluster(3, limits=LIMITS) as ranks:
        meshes, loop = [mesh_of(rank) for rank in ranks], LoopThread.shared()
        receive, held = meshes[2].receive, []
        meshes[2].receive = lambda *what: held.append(what)  # type: ignore[method-assign]  # it is frozen
        meshes[2].lose = lambda *_: None  # type: ignore[method-assign]
        handles = [rank.all_gather(torch.full((10_000,), float(rank.rank))) for rank in ranks]
        wanted = torch.arange(3.0).repeat_interleave(10_000)
        assert torch.equal(await handles[0], wanted)
        assert torch.equal(await handles[1], wanted)
        for mesh in meshes[:2]:
            loop.call(mesh.lose, 2, "silent")
        await sums([rank.subgroup([0, 1]) for rank in ranks[:2]])  # goes around the window
        for what in held:
            loop.call(receive, *what)  # it thaws
        assert torch.equal(await handles[2], wanted)
        for rank in ranks:
            rank.abort()


async def test_a_peer_whose_socket_takes_nothing_holds_up_nobody_else() -> None:
    """The peer is a stopped process: nobody can send it data over its stream, nor tell it where the data is."""
    patient = replace(Timeouts.for_tests(), suspect_s=30.0, lost_s=30.0)
    async with local_cluster(3, limits=LIMITS, timeouts=patient) as ranks:
        await sums(ranks)
        call = mesh_of(ranks[0])._outboxes[2]._call
        assert call is not None
        call._writing = True
        handles = [rank.all_gather(torch.ones(100_000)) for rank in ranks for _ in range(8)]
        await sums([rank.subgroup([0, 1]) for rank in ranks[:2]])
        assert not any(handle.done() for handle in handles[16:]), "rank 2 should miss something"
        for rank in ranks:
            rank.abort()
        for handle in handles:
            handle.exception()


async def test_who_is_asked_again_and_again_answers_what_is_new() -> None:
    """Otherwise answers would pile up for a peer that asks and does not read."""
    said: list[mesh_pb2.Control] = []

    async def put(peer: int, chunk: Chunk) -> None:
        raise AssertionError

    sharing = Sharing("", 1, 0, [1], LIMITS, put, lambda peer, chunk: said.append(chunk.control or mesh_pb2.Control()))
    window = Window(LIMITS.window_bytes, lambda _: None)
    try:
        piece = await window.put(bytes(64), [0])
        assert piece is not None
        place = mesh_pb2.Control(window_piece=mesh_pb2.WindowPiece(position=piece.start, size=64))
        full = mesh_pb2.Control(window_full=mesh_pb2.WindowFull())
        for control in (mesh_pb2.Control(window_offer=window.offer()), full, full, place, full, full):
            sharing.receive(1, Chunk(1, 0, 0, control=control), lambda _: None)
    finally:
        sharing.close()
        window.close()
    assert [control.WhichOneof("kind") for control in said] == ["window_answer", "window_released"]
    assert said[1].window_released.position == piece.end


@pytest.mark.parametrize("lending", [False, True])
async def test_who_lends_nothing_has_no_borrowers(lending: bool) -> None:
    """This holds whatever others claim that they can read."""

    async def put(peer: int, chunk: Chunk) -> None:
        raise AssertionError

    sharing = Sharing("", 1, 0, [1], LIMITS, put, lambda peer, chunk: None, lending=lending)
    opening = asyncio.ensure_future(sharing.open(60.0))
    await asyncio.sleep(0)  # it has offered its window: nobody may answer before
    answer = mesh_pb2.Control(window_answer=mesh_pb2.WindowAnswer(borrows=True))
    sharing.receive(1, Chunk(1, 0, 0, control=answer), lambda _: None)
    await asyncio.wait_for(opening, 5)
    assert sharing.borrowers == (frozenset({1}) if lending else frozenset())
    sharing.close()


@pytest.mark.parametrize("how", [Sharing.leave, Sharing.lose])
async def test_nobody_waits_for_the_answer_of_one_who_is_gone(how: Callable[[Sharing, int], None]) -> None:
    async def put(peer: int, chunk: Chunk) -> None:
        raise AssertionError

    sharing = Sharing("", 1, 0, [1], LIMITS, put, lambda peer, chunk: None)
    opening = asyncio.ensure_future(sharing.open(60.0))
    await asyncio.sleep(0)
    how(sharing, 1)
    await asyncio.wait_for(opening, 5)
    assert sharing.readers == frozenset()
    sharing.close()
