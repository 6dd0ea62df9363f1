"""Receives that take the first message from any rank: nothing is lost or goes to the wrong receive, and errors say what is wrong."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from shardnet.backend import Backend, Pending
from shardnet.backend.mesh_backend import MeshBackend
from shardnet.collectives.operation import Call, Operation
from shardnet.errors import ClosedError, CollectiveMismatch, CollectiveTimeout, PeerLost, SizeMismatchError, UsageError
from shardnet.testing import each_rank
from tests.contract.conftest import MakeCluster

Ranks = Sequence[Backend]


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def room(count: int = 1) -> list[torch.Tensor]:
    return [torch.zeros(1, dtype=torch.int64) for _ in range(count)]


async def announced(sender: Backend, receiver: Backend) -> None:
    """Wait until everything that one rank has begun to send to another has been announced there, so that later sends arrive later."""
    (into,) = room()
    sent, received = sender.send(numbers(0), receiver.rank, tag="later"), receiver.recv(into, sender.rank, tag="later")
    await received
    await sent


@pytest.mark.parametrize("elements", [1, 400])
async def test_all_that_is_sent_comes_once(four: Ranks, elements: int) -> None:
    async def work(rank: Backend) -> list[tuple[int, int]]:
        if rank.rank != 1:
            for number in range(5):
                await rank.send(torch.full((elements,), 10 * rank.rank + number), 1)
            return []
        got = []
        for _ in range(15):
            into = torch.zeros(elements, dtype=torch.int64)
            source = await rank.recv_any(into)
            assert (into == into[0]).all()
            got.append((source, int(into[0])))
        return got

    _, got, *_ = await each_rank(four, work)
    for source in (0, 2, 3):  # each sender's messages in the order in which they were sent
        assert [value for rank, value in got if rank == source] == [10 * source + number for number in range(5)]


async def test_what_was_announced_first_is_taken_first(four: Ranks) -> None:
    sends = []
    for source in (3, 0, 2):
        sends.append(four[source].send(numbers(source), 1))
        await announced(four[source], four[1])
    into = room(3)
    assert [await four[1].recv_any(each) for each in into] == [3, 0, 2]
    assert [each.item() for each in into] == [3, 0, 2]
    await asyncio.gather(*sends)


async def test_what_was_announced_first_is_what_the_first_receive_takes(fresh: MakeCluster) -> None:
    """This also holds if nothing was ever received with that tag."""
    async with fresh(4) as ranks:
        sends = []
        for source in (3, 0, 2):
            sends.append(ranks[source].send(numbers(source), 1))
            await announced(ranks[source], ranks[1])
        assert [await ranks[1].recv_any(each) for each in room(3)] == [3, 0, 2]
        await asyncio.gather(*sends)


async def test_several_that_wait_are_served_in_their_order(pair: Ranks) -> None:
    into = room(4)
    received = [pair[0].recv_any(each) for each in into]
    sent = [pair[1].send(numbers(number), 0) for number in range(4)]
    assert [await each for each in received] == [1, 1, 1, 1]
    assert [each.item() for each in into] == [0, 1, 2, 3]
    await asyncio.gather(*sent)


async def test_named_receives_go_before_it(four: Ranks) -> None:
    """A receive from any source takes only what they leave, whether they were called before it or after."""
    first, whatever, second = room(3)
    named = [four[0].recv(first, 1)]
    waiting = four[0].recv_any(whatever)
    named.append(four[0].recv(second, 1))
    sent = [four[1].send(numbers(number), 0) for number in (1, 2)]
    await asyncio.gather(*named, *sent)
    assert not waiting.done()
    await four[2].send(numbers(3), 0)
    assert await waiting == 2
    assert [each.item() for each in (first, second, whatever)] == [1, 2, 3]


async def test_tags_and_groups_are_kept_apart(four: Ranks) -> None:
    into = room(3)
    group = [four[rank].subgroup([1, 2, 3]) for rank in (1, 2, 3)]
    ours, others, theirs = four[1].recv_any(into[0], tag="a"), four[1].recv_any(into[1], tag="b"), group[0].recv_any(into[2], tag="c")
    await four[3].send(numbers(7), 1, tag="b")
    assert (await others, ours.done(), theirs.done()) == (3, False, False)
    await four[0].send(numbers(8), 1, tag="a")
    assert (await ours, theirs.done()) == (0, False)
    await group[2].send(numbers(9), 0, tag="c")
    assert await theirs == 2  # its rank in the group
    assert [each.item() for each in into] == [8, 7, 9]


async def test_who_gives_up_has_taken_nothing(pair: Ranks) -> None:
    into, again = room(2)
    with pytest.raises(CollectiveTimeout, match=r"recv from any source did not end within 0.1 s: rank 1 has not sent") as caught:
        await pair[0].recv_any(into, timeout_s=0.1)
    assert caught.value.missing == (1,)
    sent = pair[1].send(numbers(5), 0)
    assert await pair[0].recv_any(again) == 1
    await sent
    assert (into.item(), again.item()) == (0, 5)


async def test_a_sender_that_has_given_up_is_told_of(pair: Ranks) -> None:
    """As with a receive that names its source, the next send and receive match again."""
    with pytest.raises(CollectiveTimeout):
        await pair[1].send(numbers(1), 0, timeout_s=0.1)
    (into,) = room()
    with pytest.raises(CollectiveTimeout, match="was aborted by rank 1"):
        await pair[0].recv_any(into)
    sent = pair[1].send(numbers(2), 0)
    assert await pair[0].recv_any(into) == 1
    await sent
    assert into.item() == 2


async def test_what_does_not_fit_is_an_error_on_both_sides(pair: Ranks) -> None:
    wrong: list[tuple[torch.Tensor, type[Exception]]] = [(torch.zeros(1), CollectiveMismatch), (numbers(0, 0), SizeMismatchError)]
    for into, kind in wrong:
        received, sent = pair[0].recv_any(into), pair[1].send(numbers(1), 0)
        for handle in (received, sent):
            with pytest.raises(kind):
                await handle


async def test_a_death_ends_it(fresh: MakeCluster) -> None:
    async with fresh(3) as ranks:
        into = room(2)
        waiting: list[Pending[int]] = [ranks[0].recv_any(each) for each in into]
        ranks[2].abort()
        for handle in waiting:
            with pytest.raises(PeerLost, match=r"rank 2 .* lost during recv from any source") as caught:
                await handle
            assert caught.value.rank == 2


async def test_who_leaves_does_not_end_it_as_long_as_others_may_send(fresh: MakeCluster) -> None:
    async with fresh(3) as ranks:
        into = room(3)
        waiting: list[Pending[int]] = [ranks[0].recv_any(each) for each in into]
        await ranks[2].send(numbers(2), 0)
        assert await waiting[0] == 2
        await ranks[2].aclose()
        await ranks[1].send(numbers(1), 0)
        assert await waiting[1] == 1
        await ranks[1].aclose()
        with pytest.raises(PeerLost, match="it left the cluster"):
            await waiting[2]


async def test_closing_ends_it(fresh: MakeCluster) -> None:
    async with fresh(2) as ranks:
        (into,) = room()
        waiting = ranks[0].recv_any(into)
        ranks[0].abort()
        with pytest.raises(ClosedError):
            await waiting


async def test_a_rank_alone_has_nobody_to_receive_from(fresh: MakeCluster) -> None:
    async with fresh(1) as (rank,):
        with pytest.raises(UsageError, match="no other rank"):
            rank.recv_any(*room())


async def test_what_another_thread_claims_between_looking_and_taking_is_left_to_it(pair: Ranks) -> None:
    receiver, sender = pair
    assert isinstance(receiver, MeshBackend)
    call = Call("recv", "", "int64", 1.0, "send/recv")

    async def receive(_: Operation) -> None:
        raise AssertionError("it has taken what is not there")

    (into,) = room()
    with receiver._group.channels.channel(sender.rank, receiver.rank, "raced for") as channel:
        sent = sender.send(numbers(6), receiver.rank, tag="raced for")
        await announced(sender, receiver)
        assert channel.announced_since() is not None
        named = receiver.recv(into, sender.rank, tag="raced for")
        assert channel.announced_since() is None
        assert channel.operations.begin_announced(call, receive, None) is None
    await asyncio.gather(named, sent)
    assert into.item() == 6
