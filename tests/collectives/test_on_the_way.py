"""Large collectives under way: what is sent when, what a rank keeps meanwhile, and what it accepts from which rank."""

import asyncio
import tracemalloc
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.collectives import hierarchical
from shardnet.config import Limits
from shardnet.errors import CollectiveError, PeerLost, ProtocolError
from shardnet.testing import each_error, loopback_cluster
from shardnet.transport.memory import MemoryMesh
from shardnet.wire import Chunk, decode, encode
from tests.shared_loop import on_shared_loop

LIMITS = Limits(chunk_bytes=64, eager_bytes=0, window_bytes=256)  # so that nothing counts as small
TURNS = 400  # of the loop, enough for everything to go as far as it can
Hop = tuple[int, int]  # from rank, to rank


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Wire:
    """The chunks between ranks in memory: recorded, held back if a test wants it, and framed as on a network."""

    def __init__(self) -> None:
        self.sent: list[tuple[Hop, Chunk]] = []  # data only
        self.held: set[Hop] = set()
        self.broken: set[Hop] = set()
        self.framed = False
        self.lent = False  # whether sent data is overwritten as soon as it was taken
        self._send = MemoryMesh.send

    async def send(self, mesh: MemoryMesh, peer: int, chunk: Chunk) -> None:
        hop = (mesh.rank, peer)
        if len(chunk.data):
            while hop in self.held:  # noqa: ASYNC110 - turns of the loop are what the tests count
                await asyncio.sleep(0)
            if hop in self.broken:
                raise PeerLost(f"rank {peer} lost: its connection broke", peer)
            self.sent.append((hop, chunk))
        if self.framed:
            chunk = decode(b"".join(encode(chunk)))
        if not self.lent:
            await self._send(mesh, peer, chunk)
            return
        memory = bytearray(chunk.data)
        await self._send(mesh, peer, replace(chunk, data=memoryview(memory)))
        memory[:] = b"\x7f" * len(memory)

    def from_to(self, source: int, target: int) -> list[Chunk]:
        return [chunk for hop, chunk in self.sent if hop == (source, target)]


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()

    async def send(mesh: MemoryMesh, peer: int, chunk: Chunk) -> None:
        await wire.send(mesh, peer, chunk)

    monkeypatch.setattr(MemoryMesh, "send", send)
    return wire


async def same_everywhere(handles: Sequence[Pending[torch.Tensor]], value: float) -> None:
    for handle in handles:
        assert (await handle == value).all()


def test_a_full_link_holds_back_the_neighbours_and_sets_them_going_again(wire: Wire) -> None:
    """Each rank has 60 chunks for the other rank of its node, and gives it almost none while the link takes nothing."""

    @on_shared_loop
    async def run() -> None:
        across = {(source, target) for source in (0, 1) for target in (2, 3)} | {(source, target) for source in (2, 3) for target in (0, 1)}
        for kind in ("reduce_scatter", "all_reduce"):
            async with loopback_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
                wire.held = set(across)
                handles = [getattr(rank, kind)(torch.ones(4 * 30 * 16)) for rank in ranks]
                await turns()
                given = [len(wire.from_to(rank, rank ^ 1)) for rank in range(4)]
                assert max(given) <= 2 * (hierarchical._AHEAD + 1)  # of two blocks in turn, one of which must go on to the other node
                wire.held.clear()
                await same_everywhere(handles, 4.0)
                assert len(wire.from_to(0, 1)) >= 60
            wire.sent.clear()

    run()


def test_every_block_begins_before_any_goes_on(wire: Wire) -> None:
    """A rank gives its neighbour a chunk of each block in turn, beginning with the blocks that have the longest way to go."""

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(6, ranks_per_node=2, limits=LIMITS) as ranks:
            await same_everywhere([rank.reduce_scatter(torch.ones(6 * 3 * 16)) for rank in ranks], 6.0)
        places = [(chunk.offset, chunk.block) for chunk in wire.from_to(0, 1)]
        assert places == [(offset, block) for offset in (0, 64, 128, 160, 176, 184) for block in (5, 3, 1)]  # the last ones are smaller

    run()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_message_is_larger_than_a_chunk(wire: Wire, dtype: torch.dtype) -> None:
    """This also holds for the sums of 16-bit floats."""

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
            await same_everywhere([rank.all_reduce(torch.ones(500, dtype=dtype)) for rank in ranks], 4.0)
        assert max(len(chunk.data) for _, chunk in wire.sent) == LIMITS.chunk_bytes

    run()


def calls(rank: Backend) -> list[Pending[Any]]:
    """Each kind of large collective, also with blocks that are empty."""
    x = torch.ones(480)
    return [
        rank.all_reduce(x),
        rank.all_reduce(x.bfloat16()),
        rank.all_gather(x),
        rank.reduce_scatter(x),
        rank.broadcast(x, 0),
        rank.broadcast(x, 3),
        rank.all_gather(x if rank.rank == 1 else x[:0], sizes=[0, 480, 0, 0]),
        rank.reduce_scatter(x, sizes=[0, 0, 480, 0]),
    ]


@pytest.mark.parametrize("late", range(4))
@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_who_has_not_entered_gets_nothing_and_nobody_ends(wire: Wire, per_node: int, late: int) -> None:
    """Otherwise a rank would have to hold everything that faster ranks send, and one that is done could leave too early."""

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(4, ranks_per_node=per_node, limits=LIMITS) as ranks:
            early = [calls(rank) for rank in ranks if rank.rank != late]
            await turns()
            assert [chunk for (_, target), chunk in wire.sent if target == late] == []
            assert not any(handle.done() for handles in early for handle in handles)
            for handles in (*early, calls(ranks[late])):
                for handle in handles:
                    await handle

    run()


@pytest.mark.parametrize("late", range(4))
@pytest.mark.parametrize("per_node", [1, 2, 3])
def test_another_node_gets_no_more_than_it_may_hold_before_it_has_entered(wire: Wire, per_node: int, late: int) -> None:
    """It gets that much in any case: its link need not wait for an announcement."""
    limits = replace(LIMITS, eager_bytes=40)

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(4, ranks_per_node=per_node, limits=limits) as ranks:
            early = [calls(rank) for rank in ranks if rank.rank != late]
            await turns()
            got = Counter[tuple[int, int]]()
            for (source, target), chunk in wire.sent:
                if target == late:
                    assert source // per_node != late // per_node
                    got[source, chunk.sequence] += len(chunk.data)
            assert max(got.values()) == limits.eager_bytes
            assert not any(handle.done() for handles in early for handle in handles)
            for handles in (*early, calls(ranks[late])):
                for handle in handles:
                    await handle

    run()


@pytest.mark.parametrize("per_node", [1, 2, 3, 4])
def test_what_is_lent_is_not_kept(wire: Wire, per_node: int) -> None:
    """Data that lies in a window is overwritten when its reader has taken it."""

    @on_shared_loop
    async def run() -> None:
        wire.lent = True
        async with loopback_cluster(4, ranks_per_node=per_node, limits=LIMITS) as ranks:
            for dtype in (torch.float32, torch.bfloat16):
                x = torch.ones(480, dtype=dtype)
                await same_everywhere([rank.all_reduce(x) for rank in ranks], 4.0)
                await same_everywhere([rank.reduce_scatter(x) for rank in ranks], 4.0)
                await same_everywhere([rank.all_gather(x) for rank in ranks], 1.0)
                await same_everywhere([rank.broadcast(x if rank.rank == 1 else 0 * x, 1) for rank in ranks], 1.0)

    run()


def test_what_comes_from_another_node_before_the_buffer_is_granted_is_kept(wire: Wire) -> None:
    """Rank 3 knows where the data belongs only when rank 2, the keeper of its node, has entered."""

    @on_shared_loop
    async def run() -> None:
        wire.lent = True
        async with loopback_cluster(4, ranks_per_node=2, limits=replace(LIMITS, eager_bytes=40, inline_bytes=16)) as ranks:
            handles = []
            for rank in (3, 1, 0, 2):
                handles.append(ranks[rank].all_gather_on_node(torch.full((480,), float(rank))))
                await turns()
            assert len(wire.from_to(1, 3)) > 1
            for handle in handles:
                assert torch.equal((await handle).tensor, torch.arange(4.0).repeat_interleave(480))

    run()


def test_a_second_phase_waits_for_its_own_announcement(wire: Wire) -> None:
    """A sum of 16-bit floats on a ring is an exchange and then a gather, which rank 0 has not entered yet."""

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(3, ranks_per_node=1, limits=replace(LIMITS, eager_bytes=40)) as ranks:
            wire.held = {(1, 0)}
            handles = [rank.all_reduce(torch.ones(480).bfloat16()) for rank in ranks]
            await turns()
            assert [chunk.block for chunk in wire.from_to(2, 0) if chunk.block] == []
            wire.held.clear()
            await same_everywhere(handles, 3.0)
            assert [chunk.block for chunk in wire.from_to(2, 0) if chunk.block]

    run()


def test_what_came_is_passed_on_as_it_came_up_to_a_bound(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """While its link is held, rank 1 gets 40 chunks to pass on. Besides the one being sent it keeps 3 of them as they came, and reads
    the rest again. Each one that is sent makes room for another."""

    @on_shared_loop
    async def run() -> None:
        wire.framed = True
        async with loopback_cluster(3, ranks_per_node=1, limits=LIMITS) as ranks:

            async def as_it_came(held: set[Hop]) -> int:
                wire.held = held
                handles = [rank.broadcast(torch.full((40 * 16,), 1.0 + rank.rank), 0) for rank in ranks]
                await turns()
                wire.held = set()
                await same_everywhere(handles, 1.0)
                frames = [chunk.frame is not None for chunk in wire.from_to(1, 2)]
                wire.sent.clear()
                return sum(frames)

            assert await as_it_came({(1, 2)}) == 4
            assert await as_it_came(set()) == 40

    monkeypatch.setattr(hierarchical, "MAX_HELD_BYTES", 3 * 112)
    run()


def test_a_node_of_one_rank_widens_its_part_as_it_goes() -> None:
    """Widening all of it when the collective begins would hold up everything else in the process, and take memory."""
    limits = Limits(chunk_bytes=4096, eager_bytes=0, window_bytes=16384)

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(3, ranks_per_node=2, limits=limits) as ranks:
            mine = torch.ones(3 * 40_000, dtype=torch.bfloat16)
            tracemalloc.start()
            try:
                handles = [ranks[2].reduce_scatter(mine)]
                await turns()
                assert tracemalloc.get_traced_memory()[1] < mine.nbytes // 2
            finally:
                tracemalloc.stop()
            await same_everywhere([*handles, *(rank.reduce_scatter(mine) for rank in ranks[:2])], 3.0)

    run()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_connection_that_breaks_in_the_middle_of_sending(wire: Wire, lost: int) -> None:
    """The connection is to the rank of its own node or to the one across: the error tells everyone which rank, and in which collective."""

    def call(rank: Backend) -> Pending[torch.Tensor]:
        return rank.all_reduce(torch.ones(960))

    @on_shared_loop
    async def run() -> None:
        wire.broken = {(0, lost)}
        async with loopback_cluster(4, ranks_per_node=2, limits=LIMITS) as ranks:
            for error in await each_error(ranks, call):
                assert isinstance(error, PeerLost)
                assert error.rank == lost
                assert f"rank {lost} (memory:{lost}) lost during all_reduce #0: " in str(error)
            wire.broken = set()
            await same_everywhere([call(rank) for rank in ranks], 4.0)

    run()


@pytest.mark.parametrize("per_node", [2, 4])
def test_what_was_added_up_is_let_go(per_node: int) -> None:
    """A rank holds only the neighbours' parts that wait for others, not all of them until the end."""
    limits = Limits(chunk_bytes=4096, eager_bytes=0, window_bytes=16384)

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(4, ranks_per_node=per_node, limits=limits) as ranks:
            mine = torch.ones(4 * 100_000)
            tracemalloc.start()
            try:
                await same_everywhere([rank.reduce_scatter(mine) for rank in ranks], 4.0)
                assert tracemalloc.get_traced_memory()[1] < mine.nbytes // 4
            finally:
                tracemalloc.stop()

    run()


# Rank 0 of two nodes of two, with 40 floats in each block. It adds up block 0 (its own) from ranks 1 and 2, and block 2 from rank 1.
# Of the result it receives blocks 4 + 1 and 4 + 3 from rank 1, and 4 + 2 from rank 2.
@pytest.mark.parametrize(
    ("source", "block", "offset", "size"),
    [
        (1, 0, 4, 64),
        (1, 0, 0, 63),
        (1, 0, 0, 164),
        (3, 0, 0, 64),
        (2, 2, 0, 64),
        (1, 1, 0, 64),
        (1, 3, 0, 64),
        (1, 4, 0, 64),
        (2, 4, 0, 64),
        (2, 5, 0, 64),
        (1, 6, 0, 64),
        (3, 6, 0, 64),
        (1, 5, 64, 64),
        (1, 9, 0, 64),
        (2, 10, 0, 64),
        (2, 2**32 - 2, 0, 64),
    ],
    ids=[
        *("gap", "half an element", "too much", "not the carrier there", "it begins here", "its neighbour's", "carried by the neighbour"),
        *("its own result", "its own result from across", "from across", "not from across", "from another one across", "gap in a result"),
        *("no block", "no block from across", "far beyond"),
    ],
)
def test_a_chunk_that_does_not_fit(source: int, block: int, offset: int, size: int) -> None:
    assert_refused(lambda rank: rank.all_reduce(torch.ones(160)), [(source, block, offset, size)])


def test_a_sum_of_16_bit_floats_comes_from_across_in_32_and_from_the_node_in_16() -> None:
    def call(rank: Backend) -> Pending[torch.Tensor]:
        return rank.all_reduce(torch.ones(160).bfloat16())

    assert_refused(call, [(2, 0, 0, 64), (2, 0, 64, 66)])
    assert_refused(call, [(1, 0, 0, 32), (1, 0, 16, 32)])


def test_a_gather_takes_nothing_to_add_and_a_reduction_no_result() -> None:
    assert_refused(lambda rank: rank.all_gather(torch.ones(40)), [(1, 0, 0, 64)])
    assert_refused(lambda rank: rank.reduce_scatter(torch.ones(160)), [(1, 5, 0, 64)])


def test_parts_that_were_cut_in_other_ways_do_not_add_up() -> None:
    words = r"rank \d sent its part of block 0 in chunks of another size than the others; give all ranks the same Limits"
    assert_refused(lambda rank: rank.all_reduce(torch.ones(160)), [(1, 0, 0, 64), (2, 0, 0, 32), (3, 0, 0, 64)], words, per_node=4)


def test_across_nodes_chunks_have_one_size() -> None:
    """Otherwise a flood of small pieces would each be kept until the others have come."""
    assert_refused(lambda rank: rank.all_reduce(torch.ones(160)), [(1, 0, 0, 64), (2, 0, 0, 32)])
    assert_refused(lambda rank: rank.all_reduce(torch.ones(160)), [(1, 0, 0, 64), (1, 0, 64, 4)])


@pytest.mark.parametrize(
    ("limits", "call"),
    [
        (LIMITS, lambda rank: rank.all_reduce(torch.ones(160))),
        (LIMITS, lambda rank: rank.all_to_all(torch.ones(160))),
        (Limits(eager_bytes=512), lambda rank: rank.all_reduce(torch.ones(160))),  # 640 bytes, in two blocks
    ],
    ids=["hierarchical", "exchange", "two shots"],
)
def test_an_error_in_a_sub_group_names_the_rank_of_the_mesh(limits: Limits, call: Callable[[Backend], Pending[torch.Tensor]]) -> None:
    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(4, ranks_per_node=1, limits=limits) as ranks:
            group, _ = (ranks[member].subgroup([1, 3]) for member in (1, 3))
            handle = call(group)
            await turns()
            ranks[1]._board.on_chunk(3, Chunk(1, group._group.id, 0, 0, 4, bytes(8)))
            with pytest.raises(ProtocolError, match="rank 3 sent 8 bytes"):
                await handle

    run()


def assert_refused(
    call: Callable[[Backend], Pending[torch.Tensor]], chunks: list[tuple[int, int, int, int]], words: str = "", *, per_node: int = 2
) -> None:
    """Rank 0 of 4 accepts all of these chunks except the last, which ends the collective for everyone, and nothing else."""

    @on_shared_loop
    async def run() -> None:
        async with loopback_cluster(4, ranks_per_node=per_node, limits=LIMITS) as ranks:
            handle = call(ranks[0])
            await turns()  # it waits for the others now
            for source, block, offset, size in chunks:
                assert not handle.done()
                ranks[0]._board.on_chunk(source, Chunk(1, 0, 0, block, offset, bytes(size)))
            source, block, offset, size = chunks[-1]
            with pytest.raises(
                ProtocolError, match=words or f"rank {source} sent {size} bytes of block {block} at offset {offset}, which were not due"
            ):
                await handle
            for error in await each_error(ranks[1:], call):
                assert isinstance(error, CollectiveError)
            await same_everywhere([rank.all_reduce(torch.ones(160)) for rank in ranks], 4.0)

    run()
