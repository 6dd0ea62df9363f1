"""Sub-groups: every collective works on them unchanged, beside the parent's and each other's."""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending, ReduceOp, SubBackend
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.group import Group
from shardnet.collectives.switchboard import Switchboard
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, CollectiveTimeout, InvalidRankError, PeerLost
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.testing import each_error, each_rank, reference, same_bits
from shardnet.wire import Chunk
from tests.contract.conftest import KINDS, MakeCluster, cluster

Ranks = Sequence[Backend]


def groups_of(ranks: Ranks, members: Sequence[int]) -> list[Backend]:
    """The sub-group as each of its members sees it."""
    return [ranks[member].subgroup(members) for member in sorted(set(members))]


@pytest.mark.parametrize("members", [[0, 1, 2, 3], [1, 3], [0, 2, 3], [2]], ids=str)
async def test_every_collective(four: Ranks, members: list[int]) -> None:
    for elements in (1, 40):
        whole = [torch.arange(elements * len(members)) + member * 100 for member in members]
        mine = [each[:elements] for each in whole]

        async def work(rank: Backend, mine: list[torch.Tensor] = mine, whole: list[torch.Tensor] = whole) -> None:
            r, last = rank.rank, rank.world_size - 1
            assert same_bits(await rank.all_reduce(mine[r]), reference.all_reduce(mine)[r])
            assert same_bits(await rank.all_reduce(mine[r], ReduceOp.MAX), reference.all_reduce(mine, ReduceOp.MAX)[r])
            assert same_bits(await rank.broadcast(mine[r], last), mine[last])
            assert same_bits(await rank.all_gather(mine[r]), reference.all_gather(mine)[r])
            assert same_bits(await rank.reduce_scatter(whole[r]), reference.reduce_scatter(whole)[r])
            assert same_bits(await rank.all_to_all(whole[r]), reference.all_to_all(whole)[r])
            await rank.barrier()
            if last and r == 0:
                await rank.send(mine[0], last)
            if last and r == last:
                assert same_bits(await rank.recv(torch.empty_like(mine[0]), 0), mine[0])

        await each_rank(groups_of(four, members), work)


async def test_beside_the_parent_and_each_other(four: Ranks) -> None:
    """All groups of four ranks at once, interleaved with the parent's collectives, in another order on every rank."""
    every = [list(members) for size in (2, 3, 4) for members in combinations(range(4), size)]

    async def work(rank: Backend) -> None:
        mine = [members for members in every if rank.rank in members]
        groups = {tuple(members): rank.subgroup(members) for members in (mine if rank.rank % 2 else reversed(mine))}
        results = []
        for number in range(10):
            for members, group in groups.items():
                results.append((group.all_reduce(torch.tensor([number * 10 + rank.rank])), sum(number * 10 + m for m in members)))
            results.append((rank.all_reduce(torch.tensor([number])), 4 * number))
        for handle, expected in reversed(results):
            assert (await handle).item() == expected

    await each_rank(four, work)


async def test_nested(four: Ranks) -> None:
    outer = groups_of(four, [1, 2, 3])
    inner = groups_of(outer, [0, 2])  # ranks 1 and 3 of the four
    assert [(group.rank, group.world_size) for group in inner] == [(0, 2), (1, 2)]
    assert isinstance(inner[1], SubBackend)
    assert inner[1].to_global(1) == 2  # a rank of the parent, which is itself a sub-group
    sums = await each_rank(inner, lambda rank: rank.all_reduce(torch.tensor([rank.rank + 1.0])))
    assert [each.tolist() for each in sums] == [[3.0], [3.0]]
    with pytest.raises(InvalidRankError):
        outer[0].subgroup([0, 3])


async def test_two_groups_of_the_same_ranks_are_two(pair: Ranks) -> None:
    """Awaited on one rank in the opposite order: neither waits for the other."""
    first, second = groups_of(pair, [0, 1]), groups_of(pair, [0, 1])
    zero = [first[0].all_reduce(torch.tensor([1])), second[0].all_reduce(torch.tensor([10]))]
    one = [second[1].all_reduce(torch.tensor([20])), first[1].all_reduce(torch.tensor([2]))]
    assert [(await handle).item() for handle in zero + one] == [3, 30, 30, 3]


async def test_a_group_that_one_member_makes_late(pair: Ranks) -> None:
    """What arrives for the group before that is kept, in order."""
    early = pair[0].subgroup([0, 1])
    handles = [early.all_reduce(torch.full((size,), 1.0)) for size in (1, 50, 3)]
    await each_rank(pair, lambda rank: rank.barrier())  # so the first messages of the group have arrived at rank 1
    late = pair[1].subgroup([0, 1])
    for size, handle in zip((1, 50, 3), handles, strict=True):
        assert (await late.all_reduce(torch.full((size,), 2.0))).tolist() == [3.0] * size
        assert (await handle).tolist() == [3.0] * size


async def test_channels_made_by_two_threads_at_once(pair: Ranks) -> None:
    """Many threads start the first sends of a pair: all of them use the same channel."""

    def exchange(number: int) -> int:
        group = [rank.subgroup([0, 1]) for rank in pair]
        del group
        sent = pair[0].send(torch.tensor([number]), 1)
        received = pair[1].recv(torch.empty(1, dtype=torch.int64), 0)
        sent.wait(10.0)
        return int(received.wait(10.0).item())

    got = await asyncio.gather(*(asyncio.to_thread(exchange, number) for number in range(40)))
    assert sorted(got) == list(range(40))


async def test_an_error_in_a_group_is_the_groups_alone(four: Ranks) -> None:
    """The error names the cluster's ranks; the parent and the next collective of the group are unaffected."""
    groups = groups_of(four, [1, 3])
    beside = [rank.all_reduce(torch.ones(50)) for rank in four[:3]]
    errors = await each_error(groups, lambda rank: rank.barrier() if rank.rank else rank.all_reduce(torch.ones(1)))
    for error in errors:
        assert isinstance(error, CollectiveMismatch)
        for text in ("rank 1 is in all_reduce(float32 [1], sum)", "rank 3 is in barrier()", "the group of ranks [1, 3]"):
            assert text in str(error)
    beside.append(four[3].all_reduce(torch.ones(50)))
    assert [(await handle).tolist() for handle in beside] == [[4.0] * 50] * 4
    await each_rank(groups, lambda rank: rank.barrier())


@pytest.mark.parametrize("kind", KINDS)
async def test_nodes_of_a_group(kind: str) -> None:
    async with cluster(kind, 4, ranks_per_node=2) as four:
        assert four[0].node_ranks == ((0, 1), (2, 3))
        assert groups_of(four, [1, 3])[0].node_ranks == ((0,), (1,))
        assert groups_of(four, [1, 2, 3])[0].node_ranks == ((0,), (1, 2))


async def test_closing_a_group_closes_nothing_else(pair: Ranks) -> None:
    for group in groups_of(pair, [0, 1]):
        await group.aclose()
    await each_rank(pair, lambda rank: rank.barrier())


async def test_aborting_a_group_aborts_the_parent(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        groups_of(ranks, [0, 1])[0].abort()
        with pytest.raises(ClosedError):
            await ranks[0].barrier()


def _calls(group: Backend, other: int) -> list[Callable[[], Pending[Any]]]:
    """Calls of collectives, then of sends and receives that match nothing if several ranks make these calls."""
    return [
        *(partial(group.all_reduce, torch.ones(size)) for size in (4, 400, 4000)),
        partial(group.send, torch.ones(3), other, tag="1"),
        partial(group.recv, torch.ones(3), other, tag="2"),
        partial(group.recv_any, torch.ones(3, device="cpu"), tag="3"),
    ]


async def test_one_ends_alone(four: Ranks) -> None:
    """Everything under way in that group ends; its ranks hear why, and everything else that they do goes on."""
    groups, others = groups_of(four, [0, 2, 3]), groups_of(four, [0, 2, 3])
    await each_rank(groups, lambda rank: rank.barrier())
    beside = [rank.all_reduce(torch.ones(50)) for rank in four[:3]]
    kept = [ranks[0].recv(torch.zeros(3), sender, tag="1") for ranks, sender in ((four, 2), (others, 1))]
    waiting = [call() for call in _calls(groups[0], 1)[-3:]]
    late = [call() for group in groups[1:] for call in _calls(group, 0)]
    groups[0].disband("it is no more")
    for handle in waiting:
        with pytest.raises(ClosedError, match="it is no more"):
            await handle
    for handle in late:
        with pytest.raises(CollectiveError, match=r"was aborted by rank 0: .* it is no more"):
            await handle
    for group, error in zip(groups, (ClosedError, CollectiveError, CollectiveError), strict=True):
        for call in _calls(group, (group.rank + 1) % 3):
            with pytest.raises(error, match="it is no more"):
                await call()
    for sender in (four[2], others[1]):
        await sender.send(torch.ones(3), 0, tag="1")
    assert [(await handle).tolist() for handle in kept] == [[1.0] * 3] * 2
    beside.append(four[3].all_reduce(torch.ones(50)))
    assert [(await handle).tolist() for handle in beside] == [[4.0] * 50] * 4


async def test_who_has_ended_a_group_hears_its_own_reason(four: Ranks) -> None:
    """Also if another rank's message about the end comes between a call and the call's first step."""
    group = groups_of(four, [0, 1])[0]
    assert isinstance(group, SubBackend)
    group.disband("it is no more")
    loop = LoopThread.shared()
    begun = list[Pending[torch.Tensor]]()

    def call_and_hear() -> None:
        begun.append(group.all_reduce(torch.ones(400)))
        loop.call(group._group._hear_end, mesh_pb2.GroupEnded(rank=0, detail="it is no more"))

    loop.call(call_and_hear)
    await loop.run_here(asyncio.sleep(0))
    with pytest.raises(ClosedError, match="it is no more"):
        await begun[0]


@pytest.mark.parametrize("ended", [True, False])
async def test_of_those_that_are_made_again_and_again_none_is_kept(four: Ranks, ended: bool) -> None:
    """Groups go if one of their ranks ends them, or if all ranks drop them, even with operations under way."""
    seen = list[weakref.ref[Group]]()
    for number in range(40):
        groups = groups_of(four, [0, 1, 3])
        handles: list[Pending[Any]] = [group.all_reduce(torch.ones(40)) for group in groups]
        handles += [groups[1].recv(torch.zeros(2), 0, tag="a"), groups[0].send(torch.ones(2), 1, tag="a")]
        received: Pending[Any] = groups[2].recv_any(torch.zeros(2, device="cpu"))
        handles += [] if ended else [groups[1].send(torch.ones(2), 2)]
        seen += [weakref.ref(group._group) for group in groups if isinstance(group, SubBackend)]
        if ended:
            for handle in handles:
                await handle
            groups[number % 3].disband("it is no more")
        del groups
        if ended:
            with pytest.raises((ClosedError, CollectiveError), match="it is no more"):
                await received
        else:
            assert await received == 1
            for handle in handles:
                await handle
    del handles, handle, received
    assert len(seen) == 120
    await _until_few(seen, four)


async def _until_few(seen: Sequence["weakref.ref[Group]"], ranks: Ranks) -> None:
    """Make groups until few of those are left: groups that cannot go at once go when others are made."""
    gc.collect()
    while len([each for each in seen if each() is not None]) > 2:
        await each_rank(groups_of(ranks, [0, 1]), lambda rank: rank.barrier())
        gc.collect()


@pytest.mark.parametrize("made", [True, False])
async def test_of_one_that_all_have_left_but_the_dead_nothing_is_kept(fresh: MakeCluster, made: bool) -> None:
    """Whether the dead rank had made the group or not."""
    async with fresh(3) as ranks:
        groups = groups_of(ranks, [0, 1, 2]) if made else [rank.subgroup([0, 1, 2]) for rank in ranks[:2]]
        if made:
            await each_rank(groups, lambda rank: rank.barrier())
        seen = [weakref.ref(group._group) for group in groups[:2] if isinstance(group, SubBackend)] * 2
        del groups
        ranks[2].abort()
        with pytest.raises(PeerLost):
            await ranks[0].barrier()
        await _until_few(seen, ranks)


async def test_who_makes_one_and_leaves_it_ahead_of_another_rank_says_no_more_than_that_it_has_made_it(four: Ranks) -> None:
    ours, board = four[0].subgroup([0, 1]), _board_of(four[1])
    assert isinstance(ours, SubBackend)
    number = ours._group.id
    del ours
    gc.collect()
    await board.loop.run_here(asyncio.sleep(0))
    for _ in range(3):
        await each_rank(four, lambda rank: rank.barrier())
    words = [chunk.control for _, chunk in board._unknown.take(number)]
    assert [word and word.WhichOneof("kind") for word in words] == ["group_made"]
    four[1].subgroup([0, 1])  # so that both ranks have made equally many groups


async def test_a_receive_from_any_outlives_its_group(four: Ranks) -> None:
    groups = groups_of(four, [0, 1, 2])
    await each_rank(groups, lambda rank: rank.barrier())
    received = groups[0].recv_any(torch.zeros(2, device="cpu"), timeout_s=0.5)
    del groups
    for _ in range(3):
        gc.collect()
        await each_rank(groups_of(four, [0, 1]), lambda rank: rank.barrier())
    with pytest.raises(CollectiveTimeout):
        await received


def _board_of(rank: Backend) -> Switchboard:
    assert isinstance(rank, MeshBackend)
    return rank._board


async def test_who_ends_one_takes_back_the_letters_that_nobody_has_read() -> None:
    """Otherwise there would some day be no room for others."""
    async with cluster("shm", 2) as ranks:
        for _ in range(100):
            groups = groups_of(ranks, [0, 1])
            await each_rank(groups, lambda rank: rank.barrier())
            unread = groups[0].all_reduce(torch.ones(4))
            groups[0].disband("it is no more")
            with pytest.raises(ClosedError, match="it is no more"):
                await unread
        await each_rank(ranks, lambda rank: rank.barrier())
        mailbox = _board_of(ranks[0]).mesh.mailbox
        assert mailbox is not None
        assert len([each for each in mailbox._posted if not each.free]) <= 20


async def test_what_comes_for_one_that_is_over_is_stale(four: Ranks) -> None:
    """The sender is not told."""
    groups = groups_of(four, [0, 1])
    assert isinstance(groups[0], SubBackend)
    board, number = groups[0]._board, groups[0]._group.id
    await each_rank(groups, lambda rank: rank.barrier())
    groups[0].disband("it is no more")
    while number in {group.id for group in board.groups}:
        await groups_of(four, [0])[0].barrier()
    before = board.telemetry.stale_chunks
    board.loop.call(board.on_chunk, 1, Chunk(board.mesh.epoch, number, 7, data=b"late"))
    await board.loop.run_here(asyncio.sleep(0))
    assert board.telemetry.stale_chunks > before
    assert not board._unknown.take(number)


async def test_what_has_ended_before_the_end_ends_everywhere(four: Ranks) -> None:
    """A collective that the ending rank has completed can still be completed by the others, however slow they are to wait for it. And
    nobody waits for a collective that one of them has not begun."""
    for elements in (1, 400) * 10:
        groups = groups_of(four, [0, 1, 3])
        handles = [group.all_reduce(torch.ones(elements)) for group in groups]
        sent, received = groups[0].send(torch.ones(2), 1), groups[1].recv(torch.zeros(2), 0)
        await handles[0]
        await sent
        ahead = groups[0].broadcast(torch.ones(2), 0)
        groups[0].disband("it is no more")
        assert [(await handle).tolist() for handle in handles[1:]] == [[3.0] * elements] * 2
        assert (await received).tolist() == [1.0] * 2
        with contextlib.suppress(ClosedError):
            await ahead
        with pytest.raises(CollectiveError, match="it is no more"):
            await groups[1].broadcast(torch.ones(2), 0)
