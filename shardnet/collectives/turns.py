"""`Turns`: how many sends and receives a rank announces before the other one has asked for them.

[Note: turns] A rank has a channel only when it has sent or received something there, so what others announce of one it may have to
keep, and it keeps only so much (early.py). A rank that begins thousands of sends to another one, or of receives from it, with a tag each,
announces no more of them than that, and the next one when one has been answered. What the other rank has announced itself is answered at
once and needs no turn. So whatever is begun in whatever order, what both have begun goes on, but for this: a receive from any source finds
no send that has yet to have its turn, and if each of two ranks has begun more of what the other one has not than there are turns,
what both have begun behind that has to wait until some of it is answered, or has failed.

What fails without an answer keeps its turn until the other rank says that it has heard of that, and so keeps no more of it than
that. What fails before its turn waits for it all the same, to say so, unless it is asked before: its number is gone, and the other rank
would wait for it.
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

Key = tuple[int, int]  # a channel, and the number of what was begun there


@dataclass(slots=True)
class _Failure:
    """What has failed before its turn. Its data is the caller's again."""

    channel: "Group"
    sequence: int
    word: mesh_pb2.Control

    def tell(self) -> None:
        self.channel.tell(1 - self.channel.rank, self.sequence, self.word)


class Turns:
    """Those of one rank, with each other one. Runs on the loop thread."""

    def __init__(self, limits: Limits) -> None:
        self._most = most_words(limits) // 4  # half is for words of groups, and for what has just failed
        self._taken = Counter[int]()  # by global rank, as the next two
        self._kept = Counter[tuple[int, int]]()  # and by channel: of these, those that what has failed there keeps
        self._waiting: defaultdict[int, dict[Key, Operation | _Failure]] = defaultdict(dict)  # in their order

    @asynccontextmanager
    async def turn(self, op: Operation, peer: int) -> AsyncIterator[None]:
        """What is done under it announces an operation of a channel to its other end, and waits for the answer. If that fails, `keep` or
        `end` has the turn."""
        await self._wait(op, peer)
        yield
        self._give_back(op)

    async def _wait(self, op: Operation, peer: int) -> None:
        """Until it is its turn, or it needs none, because the other end has announced it."""
        rank, key = _place(op)
        self._waiting[rank][key] = op
        try:
            while not (op.has_announced(peer) or self._take(op, rank)):
                await op.news()
        except BaseException:
            if op.error is not None:  # else it has failed here, and keeps its place for the word of that
                self._leave(rank, key)
            raise
        op.awaits_turn = False
        self._leave(rank, key)

    def fail(self, op: Operation, word: mesh_pb2.Control) -> None:
        """Have the other end hear that something has failed before its turn, when its turn comes, or it is asked."""
        rank, key = _place(op)
        self._waiting[rank][key] = _Failure(op.group, op.sequence, word)
        self._call_next(rank)

    def keep(self, op: Operation) -> None:
        """The other end is about to be told that something has failed. Its turn, if it has one, is over when that was heard."""
        if op.has_turn:
            op.has_turn = False
            rank, (channel, _) = _place(op)
            self._kept[rank, channel] += 1

    def end(self, op: Operation) -> None:
        """Something has ended. If it waits for its turn, or has it, others hear of its end in another way, or not at all."""
        rank, key = _place(op)
        if self._waiting[rank].get(key) is op:
            self._leave(rank, key)
        self._give_back(op)

    def answer(self, rank: int, channel: int, sequence: int) -> None:
        """The other end of a channel is in one that is over here."""
        if isinstance(failure := self._waiting[rank].get((channel, sequence)), _Failure):
            failure.tell()
            self._leave(rank, (channel, sequence))

    def hear(self, rank: int, channel: int) -> None:
        """Another rank has heard of a failure in a channel; of one that keeps a turn perhaps."""
        key = rank, channel
        if key in self._kept:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]
            self._taken[rank] -= 1
            self._call_next(rank)

    def untold(self) -> list[Key]:
        """What has failed before its turn and nobody has heard of, the first one of a channel last."""
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
        """It does not wait any more. It may have been called, and needs no turn."""
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
            if not first.channel.is_closed:  # or nobody will ask for it
                self._taken[rank] += 1
                self._kept[rank, first.channel.id] += 1
                first.tell()


def _place(op: Operation) -> tuple[int, Key]:
    """Whose turn it waits for, the global rank at the other end of its channel, and as what."""
    return op.group.members[1 - op.group.rank], (op.group.id, op.sequence)
