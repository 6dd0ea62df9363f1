"""`Rounds`: one group's collectives by letter. Begins as many at once as the limits allow, and takes what comes for them over streams."""

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

from shardnet.collectives.ledger import Ledger
from shardnet.collectives.letters.loan_round import LoanRound
from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.letters.round import Round
from shardnet.errors import ProtocolError, ShardnetError
from shardnet.pb import mesh_pb2
from shardnet.wire import Chunk

if TYPE_CHECKING:
    from shardnet.collectives.group import Group


class Rounds:
    """Those of one group on one rank; see [Note: rounds]. Any thread may call what is not marked as for the loop thread."""

    def __init__(self, group: "Group", ledger: Ledger) -> None:
        self._group = group
        self._board = group.board
        self._ledger = ledger
        self._under_way: dict[int, Round] = {}  # by number, in their order; under the ledger's lock, like the next one
        self._queue: deque[Round] = deque()  # those of them that have not begun

    @property
    def under_way(self) -> list[Round]:
        with self._ledger.lock:
            return list(self._under_way.values())

    def find(self, sequence: int) -> Round | None:
        """The round with that number, if it is under way. Under the ledger's lock."""
        return self._under_way.get(sequence)

    def begin(self, mail: Mail, begun: Round) -> Round:
        """Number a collective that goes by letters, and begin it."""
        try:
            return self._begin(mail, begun)
        except BaseException as error:
            if begun.is_numbered:
                with self._ledger.lock:
                    if self._ledger.take(begun.flight):
                        self._under_way[begun.sequence] = begun
                begun.forgo(error)
            self.tidy()
            raise

    def tidy(self) -> None:
        """Handle a Ctrl-C in this thread, which may have left a round half ended, or the next one not begun."""
        if self._board.is_inherited:
            return  # that is for the thread that has forked this process
        for each in self.under_way:
            each.tidy()
        self._begin_next()

    def _begin(self, mail: Mail, begun: Round) -> Round:
        with self._ledger.lock:
            begun.flight = self._ledger.draft(begun.call)
            is_late = begun.sequence in self._ledger.early
            queued, is_first = len(self._under_way) >= self._board.limits.max_outstanding, not self._queue
            begun.queued = queued  # another thread may begin it as soon as the lock is free
            self._under_way[begun.sequence] = begun
            if queued:
                self._queue.append(begun)
            self._ledger.last_signature = begun.call.signature
            self._ledger.take(begun.flight)
        if self._group.is_closed:  # otherwise the ranks could end it among themselves before the loop thread gets to fail it
            begun.refuse(self._group.refuse, begun)
            return begun
        if is_late or self._board.is_impaired:
            self._board.loop.call(self._inspect, begun)
        if queued:
            for each in [*self._begun(), begun] if is_first else [begun]:  # it waits for all of these, even if no thread does
                mail.attendant.take(each)
        else:
            begun.begin()
            begun.attend()
        if len(self._under_way) > 1:
            self.sweep()
        self._board.watch.begin()
        return begun

    def sweep(self) -> None:
        """Advance the rounds that have begun, even if no thread waits for them, so that those end which can."""
        for each in self._begun():
            each.sweep()

    def _begun(self) -> list[Round]:
        """The rounds that have begun, oldest first."""
        with self._ledger.lock:
            return [each for each in islice(self._under_way.values(), self._board.limits.max_outstanding) if not each.queued]

    def end(self, ended: Round) -> None:
        """Forget a round that has ended, and begin another one that waits for its turn."""
        with self._ledger.lock:
            self._under_way.pop(ended.sequence, None)
            if ended.queued and ended in self._queue:  # it failed before its turn
                self._queue.remove(ended)
        self._begin_next()

    def _begin_next(self) -> None:
        """Begin the rounds whose turn has come. Each leaves the queue only after it has begun, since a Ctrl-C may come before."""
        while (following := self._next()) is not None:
            following.begin()
            with self._ledger.lock:
                if following in self._queue:
                    self._queue.remove(following)
            self._board.watch.begin()

    def _next(self) -> Round | None:
        """The first round in the queue, if its turn has come and the group has not ended, which would make all of them fail."""
        with self._ledger.lock:
            begun = len(self._under_way) - len(self._queue)
            if not self._queue or begun >= self._board.limits.max_outstanding or not self._group.may_go_on(self._queue[0].sequence):
                return None
            return self._queue[0]

    # --- over streams (loop thread)

    def meet(self) -> None:
        """All ranks have made the group: letters that found no room may now go over streams. See [Note: first contact] in
        first_contact.py."""
        begun, mail = self._begun(), self._group.mail
        for each in begun:
            each.begin()
        if begun and mail is not None:
            for rank in mail.views:
                mail.wake(rank)

    def inspect(self) -> None:
        """Check all rounds: the group is new to the loop thread, and something has already happened that may fail them."""
        for each in self.under_way:
            self._inspect(each)

    def _inspect(self, begun: Round) -> None:
        """Take what came for a round before it began, and fail it if it cannot end well."""
        with self._ledger.lock:
            early = self._ledger.early.take(begun.sequence)
        for source, chunk in early:
            self.hear(begun, source, chunk)
        try:
            self._group.check(begun)
        except ShardnetError as error:
            self._group.fail(begun, error)

    def hear(self, begun: Round, source: int, chunk: Chunk) -> None:
        """Take a chunk that came for a round: its sender's letter, or word of where the sender is, or what ends the round."""
        group, control = self._group, chunk.control or mesh_pb2.Control()
        if control.HasField("abort"):
            group.hear_abort(begun, source, control.abort)
        elif control.HasField("announcement") and control.announcement.signature != begun.call.signature:
            group.mismatch(begun, source, control.announcement.signature)
        elif control.HasField("announcement") and not control.announcement.posted:
            begun.deliver(source, chunk.data if chunk.frame is not None else bytes(chunk.data))
        elif control.HasField("loan_returned") and isinstance(begun, LoanRound):
            begun.take_return(source)
        elif chunk.size:
            group.fail(begun, ProtocolError(f"rank {group.members[source]} sent data for {begun.name} in an unexpected form"))

    def announce(self, begun: Round, peers: Sequence[int], data: bytes | None = None) -> None:
        """Tell other ranks which round this rank is in; with the letter as data if that found no room."""
        announcement = mesh_pb2.Announcement(signature=begun.call.signature, posted=data is None)
        for peer in peers:
            self._group.tell(peer, begun.sequence, mesh_pb2.Control(announcement=announcement), data or b"")

    def return_loan(self, begun: Round, peer: int) -> None:
        """Tell another rank that this one has read all that it needs of its loan."""
        self._group.tell(peer, begun.sequence, mesh_pb2.Control(loan_returned=mesh_pb2.LoanReturned()))
