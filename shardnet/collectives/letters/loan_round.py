"""Large collectives among ranks of one node: the letters tell where the data lies, and each rank reads it from there.

[Note: rounds that lend] A collective of data that is too large to be copied into a mailbox can still do without the loop threads. In such
a round (see [Note: rounds] in round.py) the letters hold loans instead of data (see [Note: loans]). This is MPI's rendezvous protocol with
a single copy by cross-memory attach. A rank reads what it needs from the others' memory, once, and then acknowledges their letters; its own
round ends when all others have acknowledged its letter. If a rank has more to lend once it has read (the sum of its block, in an
all-reduce), it marks its letter then.

So every rank depends on work that the others still have to do, and such a round cannot rest until somebody asks for it. If no thread
comes to wait for it within a moment, the attendant does the work, except while a thread waits for it and does the work itself. The work is
done piece by piece, so that it can be failed in between, and other rounds get their turn. A round that fails here revokes its loan, and
the memory is the caller's again.

If a letter finds no room and goes over the streams, so do its mark, as a second letter, and its acknowledgement. A rank looks at letters
that came before its round began later than at those that come while it runs, so it may see the marked letter first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.letters.round import Course, Round
from shardnet.collectives.operation import Call
from shardnet.collectives.reduction import Array
from shardnet.transport.shared_memory import Lender, Loan
from shardnet.wire import Buffer, Lent

_MARK = np.uint64(1)


@dataclass(frozen=True, slots=True)
class Lending:
    """One rank's part in a collective: the memory that it lends to the others, and what it does with what they lend."""

    lots: Sequence[Sequence[Array]]  # until the round ends they stay in place, and parts that others may still read do not change
    sends: Mapping[int, int]  # bytes of the lots that each rank gets
    receives: Mapping[int, int]  # bytes that this rank gets from each
    work: "Callable[[LoanRound], Course]"
    note: bytes = b""  # anything else that this rank tells the others
    end: Callable[[BaseException | None], object] = lambda _: None  # called when the round has ended, well or with an error


class LoanRound(Round):
    """A round whose letters say where the data is; ranks here are ranks of its group."""

    def __init__(self, mail: Mail, call: Call, lending: Lending, value: object) -> None:
        self._loan = Loan()
        super().__init__(mail, call, self._loan.letter(lending.lots, lending.note), value)
        self._lending = lending
        self._lenders: dict[int, Lender] = {}
        self._returned: set[int] = set()  # ranks that have said over their streams that they have read everything

    @property
    def may_be_stuck(self) -> bool:
        return not self.is_settled

    # --- for the work

    def collect(self, of: Collection[int] = ()) -> Course:
        yield from super().collect(of)
        letters = {rank: bytes(self._data[rank]) for rank in self._data.keys() - self._lenders.keys()}
        self.check_letters()  # before their contents are used
        for rank, letter in letters.items():
            self._lenders[rank] = Lender(self._mail.processes[rank], letter)

    def note(self, rank: int) -> bytes:
        """The note in another rank's letter. Raises LoanRevoked if any letter was taken back."""
        self.check_letters()
        return self._lenders[rank].note

    def lent(self, rank: int, lot: int, start: int, size: int) -> Lent:
        """`size` bytes of another rank's lot, from byte `start` on."""
        return self._lenders[rank].part(lot, start, size)

    def has_marked(self, rank: int) -> bool:
        """Whether another rank has more to lend now."""
        return _is_marked(self._data[rank])

    def await_marks(self, ranks: Sequence[int]) -> Course:
        """Wait until all of these ranks have marked their letters."""
        for rank in ranks:
            while not self.has_marked(rank):
                yield rank

    def mark(self) -> None:
        """Mark this rank's letter: it has more to lend now."""
        if self._posted is not None:
            self._mail.mailbox.mark(self._posted, int(_MARK))
        else:
            self._letter = _MARK.tobytes() + self._letter[_MARK.nbytes :]
            self._send_letter()

    def settle(self) -> Course:
        """Acknowledge the others' letters, as this rank has read everything, and wait until they have read everything here."""
        self.check_letters()
        self._give_back(self._lending.receives)
        for rank in self._lending.sends:
            while not self._has_returned(rank):
                yield rank

    # --- what comes over streams

    def deliver(self, rank: int, data: Buffer) -> None:
        with self._asking():
            if rank not in self._missing and _is_marked(data):
                self._data[rank] = data
        super().deliver(rank, data)

    def take_return(self, rank: int) -> None:
        """Another rank says over its stream that it has read everything."""
        with self._asking():
            self._returned.add(rank)
        self._mail.wake(rank)

    # --- the work

    def attend(self) -> None:
        self._mail.attendant.expect(self)

    def sweep(self) -> None:
        """Do nothing: the attendant does the work, because a large one may hold up the calling thread."""

    def _glance(self) -> None:
        """Do nothing, so that a thread which only asks is not held up by the work."""

    def _run(self) -> Course:
        yield from self._lending.work(self)

    def _give_back(self, ranks: Collection[int]) -> None:
        mail = self._mail
        mail.mailbox.acknowledge([(mail.views[rank], letter) for rank, letter in self._letters.items() if rank in ranks], aloud=True)
        for rank in ranks:
            if rank not in self._letters:
                mail.group.board.loop.call(mail.group.rounds.return_loan, self, rank)

    def _has_returned(self, rank: int) -> bool:
        if self._posted is None:
            return rank in self._returned
        return self._mail.views[rank].has_acknowledged(self._mail.mailbox.place, self._posted)

    def _sent(self) -> Mapping[int, int]:
        return self._lending.sends

    def _received(self) -> Mapping[int, int]:
        return self._lending.receives

    def _revoke(self) -> None:
        self._loan.revoke()

    def _forget(self) -> None:
        self._revoke()
        self._lending.end(self.error)
        self._lenders, self._lending = {}, _NOTHING


def _is_marked(letter: Buffer) -> bool:
    return bool(np.frombuffer(letter, np.uint64, 1)[0] == _MARK)


_NOTHING = Lending((), {}, {}, lambda _: iter(()))
