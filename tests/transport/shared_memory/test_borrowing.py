"""Collectives whose data is read in the lender's memory: which rank waits for which, and what happens to loans when something fails."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shardnet.backend import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.config import KIB, Limits, Timeouts
from shardnet.errors import CollectiveTimeout, PeerLost, ProtocolError, ShardnetError
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.testing import each_rank, local_cluster, loopback_cluster
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.shared_memory import Loan, lending
from shardnet.transport.shared_memory.window import Window
from shardnet.wire import Chunk, LoanRevoked
from tests.transport.shared_memory.test_sharing import mesh_of, sums

pytestmark = pytest.mark.skipif(lending._process_vm_readv is None, reason="this system has no process_vm_readv")
# without letters, otherwise rounds would do all of it
LIMITS = Limits(chunk_bytes=64 * KIB, window_bytes=256 * KIB, inline_bytes=KIB, eager_bytes=KIB, letter_bytes=0)
ELEMENTS = 240_000


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes are copied into windows, one entry per copy."""
    copied: list[int] = []
    put = Window.put

    async def counted(window: Window, data: Any, readers: Any) -> Any:
        copied.append(len(data))
        return await put(window, data, readers)

    monkeypatch.setattr(Window, "put", counted)
    return copied


@contextmanager
def deaf(mesh: GrpcMesh) -> Iterator[list[Any]]:
    """While this lasts, the rank is told nothing; it hears all of it afterwards."""
    receive, held = mesh.receive, list[Any]()
    # it stands in for a stopped process and a socket that holds what comes meanwhile, since both ends are in this process
    mesh.receive = lambda *what: held.append(what)  # type: ignore[method-assign]
    try:
        yield held
    finally:
        mesh.receive = receive  # type: ignore[method-assign]
        for what in held:
            LoopThread.shared().call(receive, *what)


async def gathers(ranks: list[ClusterBackend]) -> None:
    async def work(rank: Backend) -> None:
        mine = torch.full((ELEMENTS,), float(rank.rank))
        assert torch.equal(await rank.all_gather(mine), torch.arange(float(rank.world_size)).repeat_interleave(ELEMENTS))
        assert torch.equal(await rank.all_reduce(mine), torch.full((ELEMENTS,), sum(range(rank.world_size))).float())

    await each_rank(ranks, work)


async def test_nothing_large_is_copied_on_its_way(windows: list[int]) -> None:
    async with local_cluster(4, limits=LIMITS) as ranks:
        assert [mesh_of(rank).borrowers for rank in ranks] == [frozenset(range(4)) - {rank} for rank in range(4)]
        await gathers(ranks)
        assert windows == []
        assert [rank.telemetry.bytes_sent for rank in ranks] == [rank.telemetry.bytes_received for rank in ranks]
        assert ranks[0].telemetry.bytes_sent >= 3 * 4 * ELEMENTS
        await sums(ranks)


async def test_loans_stay_inside_a_node(windows: list[int]) -> None:
    async with local_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
        assert [mesh_of(rank).borrowers for rank in ranks] == [{1}, {0}, {3}, {2}]
        await gathers(ranks)
        assert windows == []
        await sums(ranks)


async def test_where_it_is_forbidden_windows_serve(
    windows: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lending, "_process_vm_readv", None)
    async with local_cluster(2, limits=LIMITS) as ranks:
        assert [mesh_of(rank).borrowers for rank in ranks] == [frozenset()] * 2
        await sums(ranks)
    assert sum(windows) > 4 * ELEMENTS
    assert caplog.records == []  # nobody has to do anything about it


async def test_one_that_cannot_read_does_not_hold_up_the_others(windows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    can_read, offers = lending.can_read, list[bytes]()

    def all_but_the_first(offer: mesh_pb2.WindowOffer) -> bool:
        offers.append(offer.secret)
        return offer.secret != offers[0] and can_read(offer)

    monkeypatch.setattr("shardnet.transport.shared_memory.sharing.can_read", all_but_the_first)
    async with local_cluster(3, limits=LIMITS) as ranks:
        assert sorted(len(mesh_of(rank).borrowers) for rank in ranks) == [0, 2, 2]
        await sums(ranks)
        assert windows


async def test_nobody_ends_before_all_have_read() -> None:
    """Otherwise the caller would use memory that others still read."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        mine = [torch.full((ELEMENTS,), float(rank)) for rank in range(2)]
        entered = [rank.barrier() for rank in ranks]
        for handle in entered:
            await handle
        with deaf(mesh_of(ranks[1])) as held:
            lender = ranks[0].broadcast(mine[0], 0)
            reader = ranks[1].broadcast(mine[1], 0)
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(lender.wait, 0.2)
            assert held
        assert torch.equal(await reader, mine[0])
        await lender


async def test_who_gives_up_takes_back_what_it_lent() -> None:
    """A rank is frozen, the others give up, their callers use the memory for something else, and it thaws. It was told before of all the
    data that it needs, so without revoked loans it would end well, with wrong bytes."""
    async with local_cluster(3, limits=LIMITS, timeouts=replace(Timeouts.for_tests(), suspect_s=30.0, lost_s=30.0)) as ranks:
        mine = [torch.full((ELEMENTS,), float(rank.rank)) for rank in ranks]
        with deaf(mesh_of(ranks[2])) as held:
            frozen = ranks[2].broadcast(mine[2], 0, timeout_s=2.0)
            root, other = (rank.broadcast(tensor, 0, timeout_s=0.3) for rank, tensor in zip(ranks[:2], mine, strict=False))
            assert torch.equal(await other, mine[0])
            with pytest.raises(CollectiveTimeout):
                await root
            mine[0].fill_(99)
            held[:] = [(source, chunk) for source, chunk in held if not chunk.control.HasField("abort")]
            assert any(chunk.control.HasField("loan") for _, chunk in held)
        with pytest.raises(CollectiveTimeout):
            await frozen
        for rank in ranks:
            rank.abort()


async def test_a_reader_that_dies_ends_the_collective() -> None:
    async with local_cluster(2, limits=LIMITS) as ranks:
        await gathers(ranks)
        with deaf(mesh_of(ranks[1])):
            handle = ranks[0].broadcast(torch.ones(ELEMENTS), 0)
            other = ranks[1].broadcast(torch.ones(ELEMENTS), 0)
            ranks[1].abort()
            with pytest.raises(PeerLost, match="rank 1"):
                await handle
            with pytest.raises(ShardnetError):
                await other
        ranks[0].abort()


async def test_a_loan_that_nobody_may_make_is_refused() -> None:
    """An exchange accepts no loans, and refuses it with an error for all. A rank that cannot read the lender's memory ends the stream."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        board = ranks[0]._board
        data = torch.ones(4).numpy().tobytes()
        chunk = Chunk(1, 0, 0, 0, 0, data)
        board.loop.call(mesh_of(ranks[0]).lend, 1, chunk, Loan())
        handles = [rank.all_reduce(torch.ones(4)) for rank in ranks]
        await handles[0]  # it has all that it needs
        with pytest.raises(ProtocolError, match="rank 0 sent data for all_reduce #0"):
            await handles[1]
        mesh_of(ranks[1])._sharing._lenders.clear()
        board.loop.call(mesh_of(ranks[0]).lend, 1, replace(chunk, sequence=1), Loan())
        with pytest.raises(PeerLost):
            await ranks[1].all_reduce(torch.ones(4))
        for rank in ranks:
            rank.abort()


async def test_many_at_once() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:

        async def work(rank: Backend) -> None:
            handles = [rank.all_reduce(torch.full((30_000,), float(index + rank.rank))) for index in range(40)]
            for index, handle in enumerate(handles):
                assert torch.equal(await handle, torch.full((30_000,), 3.0 * index + 3.0))

        await each_rank(ranks, work)


async def test_sums_that_cross_nodes_and_are_larger_than_a_piece() -> None:
    """Data from the node before is added piece by piece, too."""
    numbers = [torch.randn(1_200_000, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    results = []
    for cluster in (loopback_cluster(4, ranks_per_node=2), local_cluster(4, ranks_per_node=2)):
        async with cluster as ranks:
            results.append(await each_rank(ranks, lambda rank: rank.all_reduce(numbers[rank.rank])))
    assert all(torch.equal(mine, other) for mine, other in zip(*results, strict=True))


async def test_a_lender_that_lends_nothing_any_more() -> None:
    async with local_cluster(3, limits=LIMITS) as ranks:
        mesh, loop = mesh_of(ranks[0]), LoopThread.shared()
        assert mesh.borrowers == {1, 2}
        ranks[2].abort()
        with pytest.raises(PeerLost):
            await ranks[0].barrier()
        assert mesh.borrowers == {1}
        loop.call(mesh._sharing.leave, 1)
        await ranks[0].subgroup([0]).barrier()
        await loop.run_here(_soon())
        assert mesh.borrowers == frozenset()
        for rank in ranks[:2]:
            rank.abort()


async def _soon() -> None:
    """Returns when everything that was called on the loop before has run."""


async def test_a_loan_is_over_before_the_caller_knows() -> None:
    """A caller that is told of a failure may write its memory at once."""
    async with local_cluster(2, limits=LIMITS) as ranks:
        with deaf(mesh_of(ranks[1])) as held:
            lender = ranks[0].broadcast(torch.ones(ELEMENTS), 0, timeout_s=0.2)
            reader = ranks[1].broadcast(torch.ones(ELEMENTS), 0, timeout_s=0.2)
            seen: list[bool] = []

            def look(_: object) -> None:
                (loan,) = {
                    chunk.control.loan.token_address: chunk.control.loan for _, chunk in held if chunk.control.HasField("loan")
                }.values()
                try:
                    lending.Borrowed.of(os.getpid(), loan).read(0, np.zeros(8, np.uint8))
                except LoanRevoked:
                    seen.append(True)
                else:
                    seen.append(False)

            lender.add_done_callback(look)
            for handle in (lender, reader):
                with pytest.raises(CollectiveTimeout):
                    await handle
            assert seen == [True]
            held.clear()
