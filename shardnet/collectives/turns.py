"""`Turns`: limits how many sends and receives a rank announces before the other one has asked for them (turns are also called credits).

[Note: turns] A rank has a channel only once it has sent or received something there. Until then it may have to keep what others announce
in that channel, and it keeps only so much (early.py). So a rank that begins thousands of sends to another one, or of receives from it, each
with its own tag, announces no more of them than that, and another one whenever one has been answered. A send or receive that the other rank
has announced itself is answered at once and needs no turn. So whatever is begun in whatever order, operations that both ranks have begun go
on, with two exceptions. A receive from any source does not find a send that has yet to get its turn. And if each of two ranks has begun
more operations that the other one has not begun than there are turns, those that both have begun after these must wait until some of these
are answered or have failed.

An operation that fails without an answer keeps its turn until the other rank says that it has heard of the failure, so that rank never has
to keep more than the limit. An operation that fails before its turn still waits for it, to announce the failure, unless the other rank asks
before: its number is used up, and the other rank would wait for it.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.collectives.early import most_words
from shardnet.collectives.operation import Operation
from shardnet.config import Limits
from shardnet.pb import mesh_pb2

if TYPE_CHECKING:
    from shardnet.collectives.group import Group

Key = tuple[int, int]  # a channel, and the number of the operation begun there


@dataclass(slots=True)
class _Failure:
    """An operation that has failed before its turn. Its data is the caller's again."""

    channel: "Group"
    sequence: int
    word: mesh_pb2.Control

    def tell(self) -> None:
        self.channel.tell(1 - self.channel.rank, self.sequence, self.word)


class Turns:
    """Those of one rank, with each other one. Runs on the loop thread."""

    def __init__(self, limits: Limits) -> None:
        self._most = most_words(limits) // 4  # half is for words of groups, and an operation that fails sends two
        self._taken = Counter[int]()  # turns by global rank, like the next two
        self._kept = Counter[tuple[int, int]]()  # and by channel: those of the taken turns that failed operations keep
        self._waiting: defaultdict[int, dict[Key, Operation | _Failure]] = defaultdict(dict)  # in their order

    @asynccontextmanager
    async def turn(self, op: Operation, peer: int) -> AsyncIterator[None]:
        """Hold a turn while an operation of a channel is announced to the other end and waits for the answer. If that fails, `keep` or
        `end` disposes of the turn."""
        await self._wait(op, peer)
        yield
        self._give_back(op)

    async def _wait(self, op: Operation, peer: int) -> None:
        """Wait until it is the operation's turn, or until it needs none because the other end has announced it."""
        rank, key = _place(op)
        self._waiting[rank][key] = op
        try:
            while not (op.has_announced(peer) or self._take(op, rank)):
                await op.news()
        except BaseException:
            if op.error is not None:  # otherwise it has failed here, and keeps its place to announce that
                self._leave(rank, key)
            raise
        op.awaits_turn = False
        self._leave(rank, key)

    def fail(self, op: Operation, word: mesh_pb2.Control) -> None:
        """Tell the other end of an operation that has failed before its turn, when its turn comes or the other end asks."""
        rank, key = _place(op)
        self._waiting[rank][key] = _Failure(op.group, op.sequence, word)
        self._call_next(rank)

    def keep(self, op: Operation) -> None:
        """The other end is about to be told that an operation has failed. Its turn, if it has one, is over when the other end has heard."""
        if op.has_turn:
            op.has_turn = False
            rank, (channel, _) = _place(op)
            self._kept[rank, channel] += 1

    def end(self, op: Operation) -> None:
        """An operation has ended. It gives up its turn, or waiting for it: others hear of its end in another way, or not at all."""
        rank, key = _place(op)
        if self._waiting[rank].get(key) is op:
            self._leave(rank, key)
        self._give_back(op)

    def answer(self, rank: int, channel: int, sequence: int) -> None:
        """The other end of a channel has entered an operation that is over here: if it failed before its turn, say so now."""
        if isinstance(failure := self._waiting[rank].get((channel, sequence)), _Failure):
            failure.tell()
            self._leave(rank, (channel, sequence))

    def hear(self, rank: int, channel: int) -> None:
        """Another rank has heard of a failure in a channel, which may be one that keeps a turn: free that turn."""
        key = rank, channel
        if key in self._kept:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]
            self._taken[rank] -= 1
            self._call_next(rank)

    def untold(self) -> list[Key]:
        """The operations that have failed before their turn and of which the other end has not heard, the first one of a channel last."""
        waiting = (key for each in self._waiting.values() for key, failure in each.items() if isinstance(failure, _Failure))
        return sorted(waiting, reverse=True)

    def _take(self, op: Operation, rank: int) -> bool:
        if self._taken[rank] >= self._most:
            return False
        self._taken[rank] += 1
        op.has_turn = True
        return True

    def _give_back(self, op: Operation) -> None:
        if op.has_turn:
            op.has_turn = False
            rank, _ = _place(op)
            self._taken[rank] -= 1
            self._call_next(rank)

    def _leave(self, rank: int, key: Key) -> None:
        """It waits no more. If it was called, its turn goes to the next one, as it needs none."""
        self._waiting[rank].pop(key, None)
        self._call_next(rank)

    def _call_next(self, rank: int) -> None:
        waiting = self._waiting[rank]
        while self._taken[rank] < self._most and waiting:
            key, first = next(iter(waiting.items()))
            if not isinstance(first, _Failure):
                first.look()
                return
            del waiting[key]
            if not first.channel.is_closed:  # otherwise nobody will ask for it
                self._taken[rank] += 1
                self._kept[rank, first.channel.id] += 1
                first.tell()


def _place(op: Operation) -> tuple[int, Key]:
    """The global rank at the other end of an operation's channel, and the key under which it waits for a turn."""
    return op.group.members[1 - op.group.rank], (op.group.id, op.sequence)
