"""Tags that are used once, and tags that come back: a rank keeps only the sequence numbers of idle ones, and nobody can tell."""

import asyncio
import random
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives import channels
from shardnet.collectives.group import Group
from shardnet.collectives.switchboard import Switchboard
from shardnet.errors import CollectiveError, CollectiveTimeout, PeerLost
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.testing import each_error, each_rank
from shardnet.wire import Chunk
from tests.contract.conftest import MakeCluster
from tests.contract.test_any_source import announced, numbers, room

KEPT = 4
Ranks = Sequence[Backend]


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let channels be retired soon."""
    monkeypatch.setattr(channels, "KEPT", KEPT)


def board_of(rank: Backend) -> Switchboard:
    assert isinstance(rank, MeshBackend)
    return rank._board


async def on_loop(look: Any) -> Any:
    """What `look` returns on the loop thread, after everything that was handed over to that thread before."""

    async def run() -> Any:
        return look()

    return await LoopThread.shared().run_here(run())


async def one(sender: Backend, receiver: Backend, value: int, tag: str) -> None:
    (into,) = room()
    await asyncio.gather(sender.send(numbers(value), receiver.rank, tag=tag), receiver.recv(into, sender.rank, tag=tag))
    assert into.item() == value


async def push_out(sender: Backend, receiver: Backend) -> None:
    """Use so many other tags that both ranks retire all channels from one to the other that were idle before."""
    for number in range(3 * KEPT):
        await one(sender, receiver, number, f"other {number}")
    for rank in (sender, receiver):
        assert "other 0" not in await live_tags(rank)


async def live_tags(rank: Backend) -> set[str]:
    assert isinstance(rank, MeshBackend)
    group = rank._group
    await on_loop(lambda: None)
    return {tag for _, _, tag in group.channels._channels}


async def id_of(rank: Backend, tag: str) -> int:
    """The id of the channel from rank 0 to rank 1 with a tag that is in use."""
    assert isinstance(rank, MeshBackend)
    with rank._group.channels.channel(0, 1, tag) as channel:
        return channel.id


async def position(rank: Backend, group: int) -> int:
    """The position in a group that a rank would tell others if it said goodbye now."""
    goodbye = await on_loop(board_of(rank).goodbye)
    positions: dict[int, int] = {each.group: each.next_sequence for each in goodbye.positions}
    return positions[group]


async def test_hundreds_of_tags_leave_a_few_channels(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        before = [await on_loop(lambda rank=rank: len(board_of(rank).groups)) for rank in ranks]
        for number in range(100):
            await one(ranks[0], ranks[1], number, f"once {number}")
            await one(ranks[1], ranks[0], number, f"once {number}")
        for rank, then in zip(ranks, before, strict=True):
            assert await on_loop(lambda rank=rank: len(board_of(rank).groups)) <= then + 2 * KEPT + 1


async def test_many_new_tags_at_once_are_looked_through_once(fresh: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search does not run once for each channel that was made before the loop thread gets to it."""
    looked: list[Group] = []
    retire = Switchboard.retire

    def look(board: Switchboard, group: Group) -> bool:
        looked.append(group)
        return retire(board, group)

    monkeypatch.setattr(Switchboard, "retire", look)
    async with fresh(2) as ranks:
        held = threading.Event()
        LoopThread.shared().call(held.wait, 10.0)
        sends = [ranks[0].send(numbers(number), 1, tag=str(number)) for number in range(20 * KEPT)]
        held.set()
        into = room(20 * KEPT)
        for handle in [ranks[1].recv(each, 0, tag=str(number)) for number, each in enumerate(into)]:
            await handle
        for sent in sends:
            await sent
        assert len(looked) < 2 * 2 * 20 * KEPT
    assert [each.item() for each in into] == [*range(20 * KEPT)]


async def test_tags_that_come_back_go_on_where_they_were(fresh: MakeCluster) -> None:
    """Each receive gets its tag's next message, in whatever order tags are used, with several messages under way."""
    async with fresh(3) as ranks:
        rng = random.Random(5)
        plan: list[tuple[int, int, str, int]] = []
        for number in range(400):
            source, target = rng.sample(range(3), 2)
            plan.append((source, target, str(rng.randrange(20)), number))

        async def work(rank: Backend) -> None:
            under_way: deque[tuple[Pending[Any], torch.Tensor, int]] = deque()
            for sender, receiver, tag, number in plan:
                tensor = numbers(number) if rank.rank == sender else room()[0]
                if rank.rank == sender:
                    under_way.append((rank.send(tensor, receiver, tag=tag), tensor, number))
                elif rank.rank == receiver:
                    under_way.append((rank.recv(tensor, sender, tag=tag), tensor, number))
                while len(under_way) >= 6:
                    await end(*under_way.popleft())
            while under_way:
                await end(*under_way.popleft())

        async def end(handle: Pending[Any], tensor: torch.Tensor, expected: int) -> None:
            await handle
            assert tensor.item() == expected

        await each_rank(ranks, work)
        for rank in ranks:
            assert await on_loop(lambda rank=rank: len(board_of(rank)._retired)) > 0


@pytest.mark.parametrize("named", [True, False], ids=["named", "any"])
async def test_what_comes_for_a_retired_channel_waits_for_its_receive(fresh: MakeCluster, named: bool) -> None:
    async with fresh(3) as ranks:
        for number in range(3):
            await one(ranks[0], ranks[1], number, "back")
        await push_out(ranks[0], ranks[1])
        assert "back" not in await live_tags(ranks[1])
        sends = [ranks[0].send(numbers(10 + number), 1, tag="back") for number in range(3)]
        await announced(ranks[0], ranks[1])
        for number in range(3):
            (into,) = room()
            if named:
                await ranks[1].recv(into, 0, tag="back")
            else:
                assert await ranks[1].recv_any(into, tag="back") == 0
            assert into.item() == 10 + number
        for sent in sends:
            await sent


async def test_what_is_under_way_is_not_retired(fresh: MakeCluster) -> None:
    """Three cases: a receive for which nobody has sent yet, one from any source, and a message that nobody has asked for."""
    async with fresh(2) as ranks:
        early, late, any_late = room(3)
        waits = ranks[1].recv(late, 0, tag="waits"), ranks[1].recv_any(any_late, tag="waits for any")
        await one(ranks[0], ranks[1], 0, "unasked")
        sent = ranks[0].send(numbers(1), 1, tag="unasked")
        await announced(ranks[0], ranks[1])
        await push_out(ranks[0], ranks[1])
        assert await live_tags(ranks[1]) >= {"waits", "waits for any", "unasked"}
        assert await live_tags(ranks[0]) >= {"unasked"}
        await asyncio.gather(ranks[0].send(numbers(2), 1, tag="waits"), ranks[0].send(numbers(3), 1, tag="waits for any"), *waits)
        await asyncio.gather(ranks[1].recv(early, 0, tag="unasked"), sent)
        assert [each.item() for each in (early, late, any_late)] == [1, 2, 3]
        await push_out(ranks[0], ranks[1])
        assert not await live_tags(ranks[1]) & {"waits", "waits for any", "unasked"}


async def test_what_is_about_to_be_used_is_not_retired(fresh: MakeCluster) -> None:
    """Another thread has found the channel, but has not begun anything in it yet."""
    async with fresh(2) as ranks:
        assert isinstance(ranks[0], MeshBackend)
        await one(ranks[0], ranks[1], 0, "found")
        with ranks[0]._group.channels.channel(0, 1, "found"):
            await push_out(ranks[0], ranks[1])
            assert "found" in await live_tags(ranks[0])
        await one(ranks[0], ranks[1], 1, "found")


async def test_a_channel_that_was_made_and_not_taken_is_found_again(fresh: MakeCluster) -> None:
    """That happens if a Ctrl-C comes in between; a message that has come for the channel by then is not lost."""
    async with fresh(2) as ranks:
        assert isinstance(ranks[1], MeshBackend)
        number = await id_of(ranks[1], "made")
        made = ranks[1]._group.channels._channels.pop((0, 1, "made")).group
        sent = ranks[0].send(numbers(7), 1, tag="made")
        await announced(ranks[0], ranks[1])
        assert made.announced_since() is not None
        (into,) = room()
        await ranks[1].recv(into, 0, tag="made")
        await sent
        assert into.item() == 7
        assert await id_of(ranks[1], "made") == number


async def test_what_comes_late_for_a_retired_channel_is_dropped(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        await one(ranks[0], ranks[1], 0, "late")
        number = await id_of(ranks[1], "late")
        await push_out(ranks[0], ranks[1])
        stale, board = ranks[1].telemetry.stale_chunks, board_of(ranks[0])
        again = mesh_pb2.Control(announcement=mesh_pb2.Announcement(signature="of the message that has come"))
        await on_loop(lambda: board.post(1, Chunk(board.mesh.epoch, number, 0, control=again)))
        await announced(ranks[0], ranks[1])
        assert ranks[1].telemetry.stale_chunks == stale + 1
        await one(ranks[0], ranks[1], 1, "late")


async def test_who_has_retired_a_channel_says_that_it_has_heard_of_a_failure(fresh: MakeCluster) -> None:
    """Otherwise the failed message would keep its turn on the other rank for ever."""
    async with fresh(2) as ranks:
        await one(ranks[0], ranks[1], 0, "late")
        number = await id_of(ranks[1], "late")
        await push_out(ranks[0], ranks[1])
        board = board_of(ranks[0])
        word = mesh_pb2.Control(abort=mesh_pb2.Abort(reason=mesh_pb2.Abort.TIMEOUT, detail="too late"))

        def fail() -> None:
            board.turns._taken[1] += 1
            board.turns._kept[1, number] += 1
            board.post(1, Chunk(board.mesh.epoch, number, 0, control=word))

        await on_loop(fail)
        await announced(ranks[0], ranks[1])
        await announced(ranks[1], ranks[0])
        assert await on_loop(lambda: board.turns._taken[1]) == 0


async def test_a_receive_that_has_failed_takes_no_message_any_more(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        (into,) = room()
        with pytest.raises(CollectiveTimeout):
            await ranks[1].recv(into, 0, tag="failed", timeout_s=0.05)
        await push_out(ranks[0], ranks[1])
        assert "failed" not in await live_tags(ranks[1])
        with pytest.raises(CollectiveTimeout, match=r"send #0 was aborted by rank 1"):
            await ranks[0].send(numbers(1), 1, tag="failed")
        await one(ranks[0], ranks[1], 2, "failed")


async def test_who_is_waited_for_says_where_it_is_in_a_retired_channel(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        await one(ranks[0], ranks[1], 0, "asked")
        await push_out(ranks[0], ranks[1])
        (into,) = room()
        with pytest.raises(CollectiveTimeout) as caught:
            await ranks[1].recv(into, 0, tag="asked", timeout_s=0.2)
        assert "missing rank 0 (at #1)" in str(caught.value)
        assert caught.value.missing == (0,)


async def test_who_leaves_says_how_far_it_was_in_retired_channels(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        await one(ranks[0], ranks[1], 0, "left")
        await one(ranks[0], ranks[1], 0, "left")
        number = await id_of(ranks[0], "left")
        await push_out(ranks[0], ranks[1])
        assert await position(ranks[0], number) == 2
        await one(ranks[0], ranks[1], 0, "left")
        assert await position(ranks[0], number) == 3
        await push_out(ranks[0], ranks[1])
        (into,) = room()
        received = ranks[1].recv(into, 0, tag="left")
        await ranks[0].aclose()
        with pytest.raises(PeerLost, match="it left the cluster"):
            await received


async def test_a_group_ends_with_its_retired_channels(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        groups = [rank.subgroup([0, 1]) for rank in ranks]
        await one(groups[0], groups[1], 0, "ends")
        await push_out(groups[0], groups[1])
        (into,) = room()
        received = groups[1].recv(into, 0, tag="ends")  # the channel is live here and retired there
        groups[0].disband("for a test")
        with pytest.raises(CollectiveError, match="for a test"):
            await received
        errors = await each_error(groups, lambda rank: rank.send(numbers(1), 1 - rank.rank, tag="ends"))
        assert all("for a test" in str(error) for error in errors)


async def test_of_receives_from_any_source_only_those_that_wait_are_kept(fresh: MakeCluster) -> None:
    async with fresh(3) as ranks:
        assert isinstance(ranks[1], MeshBackend)
        for number in range(100):
            into, other = room(2)
            received = ranks[1].recv_any(into, tag=str(number)), ranks[1].recv_any(other, tag=str(number))
            await asyncio.gather(ranks[0].send(numbers(1), 1, tag=str(number)), ranks[2].send(numbers(1), 1, tag=str(number)))
            assert {await each for each in received} == {0, 2}
        waiting = ranks[1].recv_any(into, tag="waits")
        assert await on_loop(lambda: len(board_of(ranks[1]).receivers)) == 1
        assert list(ranks[1]._group.channels._any_sources) == ["waits"]
        await asyncio.gather(ranks[2].send(numbers(9), 1, tag="waits"), waiting)
        assert into.item() == 9
        assert ranks[1]._group.channels._any_sources == {}
        assert board_of(ranks[1]).receivers == set()
        assert {each.users for each in ranks[1]._group.channels._channels.values()} == {0}


async def test_many_threads_use_many_tags(fresh: MakeCluster) -> None:
    """Channels come and go on the loop thread while other threads look for theirs; each thread has its own tags."""
    async with fresh(2) as ranks:
        wrong = []

        def work(rank: Backend, thread: int) -> None:
            rng = random.Random(thread)
            for number in range(60):
                tag = f"{thread}: {rng.randrange(12)}"
                if rank.rank == 0:
                    rank.send(torch.tensor([number]), 1, tag=tag).wait()
                else:
                    (into,) = room()
                    rank.recv(into, 0, tag=tag).wait()
                    if into.item() != number:
                        wrong.append((tag, number, into.item()))

        threads = [threading.Thread(target=work, args=(rank, thread)) for rank in ranks for thread in range(4)]
        for thread in threads:
            thread.start()
        await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
        assert wrong == []
        assert await on_loop(lambda: len(board_of(ranks[0])._retired)) > 0
