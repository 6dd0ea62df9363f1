"""A rank may be any number of groups and messages ahead of another one, which keeps little of them and cuts nobody off."""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives import channels
from shardnet.collectives.early import most_words
from shardnet.collectives.group import Group
from shardnet.collectives.roll_call import Attendance, RollCall
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import KIB, Limits
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost
from shardnet.loop import LoopThread
from shardnet.testing import each_error, each_rank
from shardnet.wire import Chunk
from tests.contract.conftest import MakeCluster
from tests.contract.test_any_source import announced, numbers, room
from tests.contract.test_channels import KEPT, live_tags, one

# A rank keeps up to 192 KiB from another rank, which is 24 control messages (words); a mailbox has room for four letters.
LIMITS = Limits(chunk_bytes=32 * KIB, eager_bytes=32 * KIB, window_bytes=128 * KIB, letter_bytes=32 * KIB, max_outstanding=2)
WORDS = most_words(LIMITS)
GROUPS = 8
ELEMENTS = 6_000  # of 4 bytes: the data outstanding in GROUPS groups is twice what may be kept

Begin = Callable[[Backend, torch.Tensor], Pending[torch.Tensor]]
COLLECTIVES: dict[str, Begin] = {
    "all_gather": lambda rank, tensor: rank.all_gather(tensor),
    "all_reduce": lambda rank, tensor: rank.all_reduce(tensor),
    "all_to_all": lambda rank, tensor: rank.all_to_all(tensor),
    "broadcast": lambda rank, tensor: rank.broadcast(tensor, 0),
    "reduce_scatter": lambda rank, tensor: rank.reduce_scatter(tensor),
}


def kept(rank: Backend) -> int:
    """How many bytes of data a rank has kept from others for groups that it has yet to make."""
    assert isinstance(rank, MeshBackend)
    chunks = [chunk for numbers in rank._board._unknown._chunks.values() for came in numbers.values() for _, chunk in came]
    return sum(chunk.size for chunk in chunks)


async def value_on_loop(look: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return look()

    return await LoopThread.shared().run_here(run())


@pytest.mark.parametrize("name", COLLECTIVES)
async def test_groups_that_others_have_yet_to_make(fresh: MakeCluster, name: str) -> None:
    async with fresh(3, limits=LIMITS) as ranks:
        expected = [await handle for handle in [COLLECTIVES[name](rank, torch.full((ELEMENTS,), 1.0 + rank.rank)) for rank in ranks]]

        def begin(rank: Backend) -> list[Pending[torch.Tensor]]:
            groups = [rank.subgroup(range(3)) for _ in range(GROUPS)]
            return [COLLECTIVES[name](group, torch.full((ELEMENTS,), 1.0 + rank.rank)) for group in groups for _ in range(2)]

        begun = [begin(rank) for rank in ranks[:2]]
        for rank in ranks[:2]:
            await announced(rank, ranks[2])
        assert await value_on_loop(lambda: kept(ranks[2])) == 0
        begun.append(begin(ranks[2]))
        for handles, result in zip(begun, expected, strict=True):
            for handle in handles:
                assert torch.equal(await handle, result)


async def test_who_never_makes_a_group_is_named(fresh: MakeCluster) -> None:
    async with fresh(3, limits=LIMITS) as ranks:
        groups = [rank.subgroup(range(3)) for rank in ranks[:2]]
        for error in await each_error(groups, lambda rank: rank.all_gather(torch.ones(ELEMENTS), timeout_s=0.3)):
            assert isinstance(error, CollectiveError)
            assert "missing rank 2 (at #0, last entered nothing)" in str(error)
        groups.append(ranks[2].subgroup(range(3)))
        handles = [group.all_reduce(torch.ones(ELEMENTS)) for group in groups[:2]]
        await announced(ranks[1], ranks[2])
        # For rank 2 the next collective is the first one, which has failed.
        with pytest.raises(CollectiveError):
            await groups[2].all_gather(torch.ones(ELEMENTS), timeout_s=0.5)
        handles.append(groups[2].all_reduce(torch.ones(ELEMENTS)))
        for handle in handles:
            assert torch.equal(await handle, torch.full((ELEMENTS,), 3.0))


async def test_who_dies_before_it_makes_a_group_is_named(fresh: MakeCluster) -> None:
    async with fresh(3, limits=LIMITS) as ranks:
        groups = [rank.subgroup(range(3)) for rank in ranks[:2]]
        handles = [group.all_gather(torch.ones(ELEMENTS)) for group in groups for _ in range(7)]  # more than a mailbox has room for
        await announced(ranks[0], ranks[2])
        ranks[2].abort()
        for handle in handles:
            with pytest.raises(PeerLost, match="rank 2"):
                await handle
        for rank in ranks[:2]:
            rank.abort()


async def test_thousands_of_groups_that_others_have_yet_to_make(fresh: MakeCluster) -> None:
    """Keeping a word about a new group costs a rank an eighth of what any other word does."""
    async with fresh(2, limits=LIMITS) as ranks:
        groups = [ranks[0].subgroup(range(2)) for _ in range(4 * WORDS)]
        await announced(*ranks)
        last = [[ranks[1].subgroup(range(2)) for _ in groups][-1], groups[-1]]
        for handle in [group.all_reduce(torch.ones(1)) for group in last]:
            assert (await handle).item() == 2


async def test_a_group_that_ended_before_others_have_made_it(fresh: MakeCluster) -> None:
    async with fresh(3, limits=LIMITS) as ranks:
        groups = [rank.subgroup(range(3)) for rank in ranks[:2]]
        handles = [group.all_gather(torch.ones(ELEMENTS)) for group in groups for _ in range(7)]
        groups[0].disband("enough")
        for handle in handles:
            with pytest.raises((ClosedError, CollectiveError), match="enough"):
                await handle
        await announced(ranks[0], ranks[2])
        late = ranks[2].subgroup(range(3))
        await announced(ranks[2], ranks[0])
        with pytest.raises(CollectiveError, match="enough"):
            await late.all_gather(torch.ones(ELEMENTS))


async def test_a_group_that_ends_before_a_collective_has_begun_there(fresh: MakeCluster) -> None:
    """That collective fails before the others are told of the end, and counts as one that this rank has not done."""
    async with fresh(2, limits=LIMITS) as ranks:
        groups = [rank.subgroup(range(2)) for rank in ranks]
        await each_rank(groups, lambda group: group.barrier())
        theirs = groups[1].all_gather(torch.ones(ELEMENTS))
        await announced(ranks[1], ranks[0])
        loop, held = LoopThread.shared(), threading.Event()
        loop.call(held.wait, 10.0)
        loop.call(loop.loop.call_soon, groups[0].disband, "enough")  # between the collective's call and its first step
        mine = groups[0].all_gather(torch.ones(ELEMENTS))
        held.set()
        async with asyncio.timeout(10.0):
            ends = [await each_end(handle) for handle in (mine, theirs)]
        # By letter each rank may have the other one's data before the group ends.
        assert all(isinstance(end, torch.Tensor) or "enough" in str(end) for end in ends)


async def each_end(handle: Pending[torch.Tensor]) -> torch.Tensor | Exception:
    try:
        return await handle
    except (ClosedError, CollectiveError) as error:
        return error


@pytest.mark.parametrize("name", ["all_gather", "all_reduce"])
async def test_collectives_that_fail_while_a_rank_is_away(fresh: MakeCluster, name: str) -> None:
    """When it is back it hears of each failure, or which other collective it should have called; it has kept none of their data."""
    async with fresh(3, limits=LIMITS) as ranks:
        tensor = torch.ones(ELEMENTS)
        failures = WORDS // 3  # two words each; together they have three times the data that may be kept
        for _ in range(failures):
            for error in await each_error(ranks[:2], lambda rank: getattr(rank, name)(tensor, timeout_s=0.05)):
                assert "rank 2 (at #0, last entered nothing)" in str(error)
        await announced(ranks[0], ranks[2])
        for _ in range(failures - 1):
            with pytest.raises(CollectiveTimeout, match="was aborted by rank"):
                await COLLECTIVES[name](ranks[2], tensor)
        with pytest.raises((CollectiveMismatch, CollectiveTimeout), match=f"all_to_all.* {name}"):  # a failed letter is taken back
            await ranks[2].all_to_all(tensor)
        handles = [COLLECTIVES[name](rank, tensor) for rank in ranks]
        results = [await handle for handle in handles]
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("sends_first", [True, False], ids=["sends", "receives"])
async def test_more_messages_than_the_other_rank_would_keep(fresh: MakeCluster, sends_first: bool) -> None:
    """Each message has its own tag, and the last one is asked for first."""
    async with fresh(2, limits=LIMITS) as ranks:
        count = 4 * WORDS
        into = room(count)

        def send(tags: Sequence[int]) -> list[Pending[Any]]:
            return [ranks[0].send(numbers(tag), 1, tag=str(tag)) for tag in tags]

        def receive(tags: Sequence[int]) -> list[Pending[Any]]:
            return [ranks[1].recv(into[tag], 0, tag=str(tag)) for tag in tags]

        first, second = (send, receive) if sends_first else (receive, send)
        ahead, behind = ranks if sends_first else ranks[::-1]
        begun = first(range(count))
        for _ in range(2):
            await announced(behind, ahead)  # which needs no turn: the other rank asks for its messages
        assert isinstance(behind, MeshBackend)
        assert await value_on_loop(lambda: len(behind._board._unknown)) == WORDS // 4
        for handle in [*second(range(count - 1, -1, -1)), *begun]:
            await handle
        assert [each.item() for each in into] == [*range(count)]
        assert await value_on_loop(lambda: [turn for rank in ranks for turn in rank._board.turns._taken.values()]) == [0, 0]  # type: ignore[attr-defined]


async def test_a_receive_from_any_source_finds_what_has_its_turn_later(fresh: MakeCluster) -> None:
    async with fresh(2, limits=LIMITS) as ranks:
        before = [ranks[0].send(numbers(0), 1, tag=f"before {number}") for number in range(WORDS)]
        wanted = ranks[0].send(numbers(7), 1, tag="wanted")
        (into,) = room()
        found = ranks[1].recv_any(into, tag="wanted")
        for number in range(WORDS):
            await ranks[1].recv(room()[0], 0, tag=f"before {number}")
        for handle in (*before, wanted):
            await handle
        assert (await found, into.item()) == (0, 7)


async def test_who_needs_its_turn_no_more_leaves_it_to_the_next(fresh: MakeCluster) -> None:
    """A message's turn comes at the same moment at which the other rank asks for it."""
    async with fresh(2, limits=LIMITS) as ranks:
        *first, last = range(WORDS // 4 + 1)
        before = [ranks[0].send(numbers(0), 1, tag=f"before {number}") for number in (*first, last)]  # the last one does not get a turn yet
        wanted = ranks[0].send(numbers(7), 1, tag="wanted")
        (into,) = room()
        found = ranks[1].recv_any(into, tag="wanted")
        held = threading.Event()
        LoopThread.shared().call(held.wait, 10.0)
        received = [ranks[1].recv(room()[0], 0, tag=f"before {number}") for number in (*first[1:], last)]  # all of these have a turn
        held.set()
        assert (await found, into.item()) == (0, 7)
        for each in [*received, ranks[1].recv(room()[0], 0, tag="before 0")]:
            await each
        for handle in (*before, wanted):
            await handle


async def test_who_fails_while_it_is_called_leaves_its_turn_to_the_next(fresh: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The failing send is about to say which rank is missing, but by then none is."""
    asks, go_on, hold = threading.Event(), asyncio.Event(), RollCall.hold

    async def slow(self: RollCall, sequence: int) -> Attendance:
        if self._group.party.channel.startswith("'late'"):
            asks.set()
            await go_on.wait()
        return await hold(self, sequence)

    monkeypatch.setattr(RollCall, "hold", slow)
    async with fresh(2, limits=LIMITS) as ranks:
        before = [ranks[0].send(numbers(0), 1, tag=f"before {number}") for number in range(WORDS // 4)]
        late = ranks[0].send(numbers(0), 1, tag="late", timeout_s=0.1)
        wanted = ranks[0].send(numbers(7), 1, tag="wanted")
        assert await asyncio.to_thread(asks.wait, 10.0)
        for number, sent in enumerate(before):
            await ranks[1].recv(room()[0], 0, tag=f"before {number}")
            await sent
        asked_for = ranks[1].recv(room()[0], 0, tag="late")
        await announced(ranks[1], ranks[0])
        LoopThread.shared().call(go_on.set)
        for handle in (late, asked_for):
            with pytest.raises(CollectiveTimeout):
                await handle
        (into,) = room()
        assert (await ranks[1].recv_any(into, tag="wanted"), into.item()) == (0, 7)
        await wanted


async def test_what_fails_keeps_its_turn_until_the_other_rank_has_heard_of_it(fresh: MakeCluster) -> None:
    """That rank keeps little about failures: a rank that fails again and again is not cut off, and may go on."""
    async with fresh(2, limits=LIMITS) as ranks:
        assert isinstance(ranks[0], MeshBackend)
        turns = ranks[0]._board.turns
        for turn in range(4):
            vain = [ranks[0].send(numbers(0), 1, tag=f"vain {turn} {number}", timeout_s=0.1) for number in range(WORDS)]
            for handle in vain:
                with pytest.raises(CollectiveTimeout, match="missing rank 1"):
                    await handle
            await announced(ranks[1], ranks[0])
        wanted = ranks[0].send(numbers(7), 1, tag="wanted")
        (into,) = room()
        await ranks[1].recv(into, 0, tag="wanted")
        await wanted
        assert into.item() == 7
        assert await value_on_loop(lambda: (turns._taken[1], turns._waiting[1])) == (0, {})
        for turn in range(4):
            for number in range(WORDS):
                with pytest.raises(CollectiveTimeout, match="was aborted by rank 0"):
                    await ranks[1].recv(into, 0, tag=f"vain {turn} {number}")
        found = ranks[1].recv_any(into, tag="any")
        await ranks[0].send(numbers(8), 1, tag="any")
        assert (await found, into.item()) == (0, 8)


@pytest.mark.parametrize("retired", [False, True], ids=["there", "retired"])
async def test_who_asks_for_what_failed_before_its_turn_hears_it_at_once(
    fresh: MakeCluster, retired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "KEPT", KEPT)
    async with fresh(2, limits=LIMITS) as ranks:
        holding = [ranks[0].send(numbers(number), 1, tag=f"holding {number}") for number in range(WORDS // 4)]
        with pytest.raises(CollectiveTimeout, match="missing rank 1"):
            await ranks[0].send(numbers(0), 1, tag="late", timeout_s=0.1)
        if retired:
            for number in range(10 * KEPT):
                await one(ranks[1], ranks[0], number, f"other {number}")
        assert ("late" in await live_tags(ranks[0])) != retired
        (into,) = room()
        with pytest.raises(CollectiveTimeout, match="recv #0 was aborted by rank 0"):
            await ranks[1].recv(into, 0, tag="late")
        for number, sent in enumerate(holding):
            await ranks[1].recv(into, 0, tag=f"holding {number}")
            await sent
            assert into.item() == number


async def test_failures_before_and_after_their_turn_leave_no_gap(fresh: MakeCluster) -> None:
    """After as many errors as there were failures, the next message with that tag arrives, whether its source is named or not."""
    async with fresh(2, limits=LIMITS) as ranks:
        assert isinstance(ranks[0], MeshBackend)
        turns = ranks[0]._board.turns
        (into,) = room()
        for tag in ("named", "any"):
            for handle in [ranks[0].send(numbers(0), 1, tag=tag, timeout_s=0.1) for _ in range(WORDS)]:
                with pytest.raises(CollectiveTimeout):
                    await handle
            sent = ranks[0].send(numbers(7), 1, tag=tag)
            for _ in range(WORDS):
                with pytest.raises(CollectiveTimeout, match="was aborted by rank 0"):
                    await (ranks[1].recv(into, 0, tag=tag) if tag == "named" else ranks[1].recv_any(into, tag=tag))
            await (ranks[1].recv(into, 0, tag=tag) if tag == "named" else ranks[1].recv_any(into, tag=tag))
            await sent
            assert into.item() == 7
            await announced(ranks[1], ranks[0])
            assert await value_on_loop(lambda: (turns._taken[1], turns._waiting[1])) == (0, {})


async def test_who_waits_for_a_turn_hears_of_a_loss_and_of_the_end(fresh: MakeCluster) -> None:
    async with fresh(2, limits=LIMITS) as ranks:
        handles = [ranks[0].send(numbers(0), 1, tag=str(number)) for number in range(2 * WORDS)]
        await asyncio.sleep(0)
        ranks[1].abort()
        for handle in handles:
            with pytest.raises(PeerLost, match="rank 1"):
                await handle
        ranks[0].abort()


def books(rank: Backend) -> tuple[object, ...]:
    """All that a rank keeps about messages without an answer."""
    assert isinstance(rank, MeshBackend)
    turns = rank._board.turns
    return +turns._taken, turns._kept, [*filter(None, turns._waiting.values())], rank._board._unknown._chunks


async def check_settled(ranks: Sequence[Backend]) -> None:
    """Check that everything that was said has been heard, and that nothing of it is kept."""
    for _ in range(2):
        await announced(*ranks)
        await announced(*ranks[::-1])
    nothing: tuple[object, ...] = (Counter(), Counter(), [], {})
    assert await value_on_loop(lambda: [books(rank) for rank in ranks]) == [nothing, nothing]


@pytest.mark.parametrize("at", ["one rank", "both"])
async def test_groups_that_end_with_more_messages_than_the_other_rank_would_keep(fresh: MakeCluster, at: str) -> None:
    """The other rank has made none of their channels, and will not."""
    async with fresh(2, limits=LIMITS) as ranks:
        for count in (2 * WORDS, *[1] * WORDS):
            groups = [rank.subgroup(range(2)) for rank in ranks]
            handles = [groups[0].send(numbers(0), 1, tag=str(number)) for number in range(count)]
            await announced(*ranks)
            for group in groups[: 1 if at == "one rank" else 2]:
                group.disband("enough")
            for handle in handles:
                with pytest.raises((ClosedError, CollectiveError), match="enough"):
                    await handle
        await check_settled(ranks)


async def test_what_has_failed_in_groups_that_ended_keeps_no_turn(fresh: MakeCluster) -> None:
    async with fresh(2, limits=LIMITS) as ranks:
        for number in range(WORDS):
            groups = [rank.subgroup(range(2)) for rank in ranks]
            vain = [groups[0].send(numbers(0), 1, tag="to", timeout_s=0.05), groups[1].send(numbers(0), 0, tag="fro", timeout_s=0.05)]
            if number % 2:
                groups[0].disband("enough")
            for handle in vain:
                with pytest.raises((ClosedError, CollectiveError)):
                    await handle
            for group in groups:
                group.disband("enough")
        await check_settled(ranks)


async def test_a_group_that_ends_while_others_are_told_what_has_failed_there(fresh: MakeCluster) -> None:
    """Failures that do not have a turn yet are no longer told."""
    async with fresh(2, limits=LIMITS) as ranks:
        groups = [rank.subgroup(range(2)) for rank in ranks]
        vain = [groups[0].send(numbers(0), 1, tag=str(number), timeout_s=0.1) for number in range(4 * WORDS)]
        with pytest.raises(CollectiveTimeout):
            await vain[0]
        groups[0].disband("enough")
        for handle in vain:
            with pytest.raises((ClosedError, CollectiveTimeout)):
                await handle
        await check_settled(ranks)


async def test_who_has_failed_in_all_its_turns_goes_on(fresh: MakeCluster) -> None:
    """One rank fails in sends, the other in receives, and neither in anything that the other one has begun."""
    async with fresh(2, limits=LIMITS) as ranks:
        vain: list[Pending[Any]] = [ranks[0].send(numbers(0), 1, tag=f"to {number}", timeout_s=0.1) for number in range(2 * WORDS)]
        vain += [ranks[1].recv(room()[0], 0, tag=f"fro {number}", timeout_s=0.1) for number in range(2 * WORDS)]
        for handle in vain:
            with pytest.raises(CollectiveTimeout, match="missing rank"):
                await handle
        (into,) = room()
        sent, received = ranks[0].send(numbers(7), 1, tag="new"), ranks[1].recv(into, 0, tag="new")
        await received
        await sent
        assert into.item() == 7


async def test_who_leaves_with_a_failure_that_it_has_not_told_is_not_waited_for(
    fresh: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither rank hears that the other has heard of its failures, so neither gets a turn for more."""
    monkeypatch.setattr(Switchboard, "_acknowledge_abort", lambda *_: None)
    async with fresh(2, limits=LIMITS) as ranks:
        vain: list[Pending[Any]] = [ranks[0].send(numbers(0), 1, tag=f"to {number}", timeout_s=0.1) for number in range(WORDS // 4)]
        vain += [ranks[1].recv(room()[0], 0, tag=f"fro {number}", timeout_s=0.1) for number in range(WORDS // 4)]
        late = ranks[0].send(numbers(0), 1, tag="late", timeout_s=0.1)
        for handle in (*vain, late):
            with pytest.raises(CollectiveTimeout):
                await handle
        received = ranks[1].recv(room()[0], 0, tag="late", timeout_s=30.0)
        await ranks[0].aclose()
        async with asyncio.timeout(10.0):
            with pytest.raises(PeerLost, match="it left the cluster without entering this collective"):
                await received
        ranks[1].abort()


async def test_who_leaves_while_a_message_is_on_its_way_to_it_is_not_waited_for(
    fresh: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When rank 0 closes, its receive still waits for a turn, so the other rank has no answer, and gets none."""
    async with fresh(2, limits=LIMITS) as ranks:
        for number in range(WORDS // 4):
            ranks[0].recv(room()[0], 1, tag=f"vain {number}").quietly()
        ranks[0].recv(room()[0], 1, tag="late").quietly()
        await announced(*ranks)
        assert isinstance(ranks[0], MeshBackend)
        board, take = ranks[0]._board, Group.on_chunk

        def take_but_that(group: Group, source: int, chunk: Chunk) -> None:
            if group.board is not board or "'late'" not in group.party.channel:
                take(group, source, chunk)

        monkeypatch.setattr(Group, "on_chunk", take_but_that)
        sent = ranks[1].send(numbers(0), 0, tag="late", timeout_s=30.0)
        await announced(ranks[1], ranks[0])
        await ranks[0].aclose()
        async with asyncio.timeout(10.0):
            with pytest.raises(PeerLost, match="it left the cluster without entering this collective"):
                await sent
        ranks[1].abort()
