"""`Turns`: how many sends and receives a rank announces before the other one has asked for them.

[Note: turns] A rank has a channel only when it has sent or received something there, so what others announce of one it may have to
keep, and it keeps only so much (early.py). A rank that begins thousands of sends to another one, or of receives from it, with a tag each,
announces no more of them than that, and the next one when one has been answered. What the other rank has announced itself is answered at
once and needs no turn. So whatever is begun in whatever order, what both have begun goes on; but a receive from any source finds no send
that has yet to have its turn.

What fails without an answer keeps its turn, for the other rank keeps the words of it, until that one says something in the channel. What
fails before its turn has no words: who begins the other end of it later waits in vain.
"""

from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shardnet.collectives.early import most_words
from shardnet.collectives.operation import Operation
from shardnet.config import Limits
from shardnet.wire import Chunk


class Turns:
    """Those of one rank, with each other one. Runs on the loop thread."""

    def __init__(self, limits: Limits) -> None:
        self._most = most_words(limits) // 4  # of two words each, if it fails; half is for words of groups
        self._taken = Counter[int]()  # by global rank, as the next one
        self._waiting: defaultdict[int, dict[Operation, None]] = defaultdict(dict)  # in their order
        self._kept: dict[int, tuple[int, int]] = {}  # by channel: whose turns, and how many what has failed there keeps

    @asynccontextmanager
    async def turn(self, op: Operation, peer: int) -> AsyncIterator[None]:
        """What is done under it announces an operation of a channel to its other end, and waits for the answer."""
        rank, has_turn = op.group.members[peer], False
        self._waiting[rank][op], op.awaits_turn = None, True
        try:
            while not (op.has_announced(peer) or (has_turn := self._take(rank))):
                await op.news()
            op.awaits_turn = False
        finally:
            del self._waiting[rank][op]
            self._call_next(rank)  # this one may have been called, and need no turn any more
        try:
            yield
        except BaseException:
            if has_turn and not op.has_announced(peer):
                self._kept[op.group.id] = rank, 1 + self._kept.get(op.group.id, (rank, 0))[1]
                has_turn = False
            raise
        finally:
            if has_turn:
                self._give_back(rank, 1)

    def hear(self, chunk: Chunk) -> None:
        """If the other end of a channel says something there, it has it, and keeps no words of it any more."""
        if chunk.group not in self._kept or (chunk.control is not None and chunk.control.HasField("probe_reply")):
            return  # a rank answers of what it does not have, too
        self._give_back(*self._kept.pop(chunk.group))

    def _take(self, rank: int) -> bool:
        if self._taken[rank] >= self._most:
            return False
        self._taken[rank] += 1
        return True

    def _give_back(self, rank: int, turns: int) -> None:
        self._taken[rank] -= turns
        self._call_next(rank)

    def _call_next(self, rank: int) -> None:
        if self._taken[rank] < self._most and (first := next(iter(self._waiting[rank]), None)) is not None:
            first.look()
