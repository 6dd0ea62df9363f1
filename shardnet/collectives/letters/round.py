"""Collectives by letter, among ranks of one node: every rank leaves a letter, and the thread that waits reads the others' letters itself.

[Note: rounds] Handing a collective to the loop thread and its result back takes longer than a small collective needs. So a round
begins in the thread that calls it: the rank's letter, with what the collective is and with the rank's data, goes into the mailbox that
the node's other ranks can read (see [Note: mailboxes]). MPI calls this an eager protocol. The thread that waits for the round looks for the
others' letters, for a moment without sleeping, and does the work when all are there. A round for which nobody waits is done in passing by
the next one, or by the attendant, a thread that looks after rounds whose end an event loop or a callback awaits.

Rounds are numbered together with the group's other collectives, and which collectives are rounds follows from what all ranks know. Ranks
that are in different collectives find out by the letters, or by their streams: a rank that waits for long announces its round there, and if
that announcement meets a round of another collective, both end. A rank whose round fails takes its letter back and tells the others why;
they do not use what they have read of it by then. A rank that has ended the round well by the time it hears of a failure takes its letter
back, too: the rank that failed may not have seen that letter, and would never acknowledge it. A rank that has all letters is sure that all
ranks have entered the same collective. So a round that has ended well on one rank fails on another only if that one gave up first, or lost
a rank.

If a mailbox has no room because its readers lag, the letter goes over the streams instead: rounds of one group never wait for those of
another.

A Ctrl-C may come anywhere in the calling thread. The round that the thread has begun then fails, for all ranks; a round that it has ended
is concluded, because no other thread would do it. Python also looks for signals when functions are called, so no `finally` is safe from
them: a round that is left half concluded is concluded again, from the beginning.
"""

import concurrent.futures
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any

from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.operation import Call
from shardnet.errors import InheritedError, ProtocolError
from shardnet.flight import Flight, Party, State
from shardnet.loop import LoopThread
from shardnet.telemetry import Track
from shardnet.transport.shared_memory import Letter, MailboxView, Posted, give_way
from shardnet.waiting import LATE_NS
from shardnet.wire import Buffer, LoanRevoked

SLICE_S = 0.02  # the longest sleep: an error on this rank that comes just as the sleep begins is noticed only after it
# A rank that waits this long says so on its streams: the others may be in a collective that is no round. Not sooner: ranks that share
# processors wait for each other for 0.1 s in each collective of a training, and telling all others took 35 ms of the 1,050 that a step has
# of each.
REMIND_S = 0.3
_LET_IN_S = 0.0001  # how often to look whether the loop thread has got the lock that it wanted

# The work of a round, piece by piece. It yields the rank that it waits for, or None after a piece. Between pieces the round can be failed.
# It raises LoanRevoked if others have taken their letters or loans back.
Course = Iterator[int | None]

_NO_FLIGHT = Flight(Party(0, 0, ()), -1, "", "", 0, 0)


class Progress(Enum):
    """The outcome of a step of a round that does not wait for another rank."""

    MORE = "there is more to do"
    SETTLED = "there is nothing more to do"


class Round(concurrent.futures.Future[Any], ABC):
    """A collective on one rank; ranks here are ranks of its group. A thread that waits for it does its work."""

    def __init__(self, mail: Mail, call: Call, letter: Buffer, value: object) -> None:
        """`letter` is the data for the others to read."""
        super().__init__()
        self.call = call
        self.flight = _NO_FLIGHT  # until its group has numbered it
        self.error: BaseException | None = None
        self.queued = False  # its letter is not written yet: too many are under way
        self._mail = mail
        self._board = mail.group.board  # a fork of this process must do nothing for the round: [Note: forked children] in switchboard.py
        self._letter = letter
        self._is_written = False  # the letter is; a round that ended before would leave the others without it
        self._posted: Posted | None = None  # where the letter is, unless it went over the streams
        self._course = self._run()
        self.value = value  # the handle's result
        self._note = call.signature.encode()
        self._begun_s = time.monotonic()
        self._deadline = self._begun_s + call.timeout_s
        self._lock = threading.Lock()  # over what follows
        self._over = False
        self._ender = 0  # the thread that has ended it well
        self._is_concluded = False  # and everything that follows the end is done
        self._given_up = False  # only its error has yet to come, from this rank's loop thread
        self._taken_back = False  # a letter was; the round ends when its writer says why or is lost, or when its time is over
        self._missing = [*mail.views]
        self._letters: dict[int, Letter] = {}
        self._data: dict[int, Buffer] = {}
        self._looker: int | None = None  # the thread that does the work
        self._asked = False  # the loop thread wants the lock, which is not fair: a working thread takes it again and again
        self._reminded = False
        self._writing_ns = 0
        self._since_ns = 0  # when letters were first looked for: a round that nobody waits for does not count as under way
        self._waited_ns = 0  # time spent waiting for ranks that had not entered it

    @property
    def name(self) -> str:
        return self.flight.name

    @property
    def sequence(self) -> int:
        return self.flight.sequence

    @property
    def is_numbered(self) -> bool:
        return self.flight is not _NO_FLIGHT

    @property
    def readers(self) -> Sequence[MailboxView]:
        """The mailboxes with the letters of the others."""
        return self._mail.readers

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing more to do for it."""
        return self._over or self._given_up

    @property
    def has_ended(self) -> bool:
        """Whether it has its result, or its error."""
        return super().done()

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread waits for it, and does the work or leaves it to another."""
        return self._looker is not None

    @property
    def may_be_stuck(self) -> bool:
        """Whether a letter is missing. If none is, the round ends as soon as somebody asks for it."""
        with self._lock:
            return any(self._find(rank) is None for rank in self._missing)

    # --- for whoever has the handle

    def done(self) -> bool:
        self._glance()
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._look(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._look(timeout))

    def add_done_callback(self, fn: Callable[["concurrent.futures.Future[Any]"], object]) -> None:
        """Have `fn` called when the round is done. If it is done already, that happens at once; otherwise on the loop thread, as for any
        other collective, because a thread that ends a round, even by asking whether it is done, may hold a lock that `fn` needs."""
        self._glance()
        if super().done():
            super().add_done_callback(fn)
            return
        self._board.check_ours()
        loop = self._board.loop  # a closure over the round would keep it, and its result, alive
        super().add_done_callback(lambda done: loop.call(fn, done))
        if not self._over:
            self._mail.attendant.take(self)

    def _glance(self) -> None:
        """Do what can be done now, as somebody asks whether the round is done."""
        if self._board.is_inherited:
            return
        try:
            if self.progress() is not None:
                self.has_waited(time.monotonic())
        except BaseException:
            self._mail.group.rounds.tidy()
            raise

    # --- the work

    def attend(self) -> None:
        """Called when it has begun and nobody waits for it yet."""

    def sweep(self) -> None:
        """Called when another round of the group begins."""
        self.advance()

    def refuse(self, function: Callable[..., object], *args: object) -> None:
        """Called in place of `begin`: the round cannot end well, and the loop thread calls `function` to fail it with the reason."""
        with self._lock:
            self._give_up(function, *args)

    def forgo(self, error: BaseException) -> None:
        """Fail it after a Ctrl-C that came while it began: nobody has its handle, but the other ranks wait for this one."""
        with self._lock:
            if not self.is_settled:
                self._give_up(self._mail.group.fail, self, error)
            self._revoke()

    def begin(self) -> None:
        """Leave this rank's letter."""
        mail = self._mail
        with self._lock:
            if self.is_settled or self._is_written:
                return
            was_queued, self.queued = self.queued, False
            start = time.perf_counter_ns()
            self.flight.entered_ns = self.flight.entered_ns or start
            self.flight.bytes_sent = sum(self._sent().values())
            try:
                self._posted = mail.mailbox.post(mail.group.id, self.sequence, self._note, self._letter, mail.readers)
                if self._posted is None and not mail.group.first_contact.is_over:
                    return  # its readers would have to keep it, as some have not made the group: `Rounds.meet` calls this again
                if self._posted is None:
                    self._send_letter()
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits for this round
                self._break_off(error)
            self._is_written = True
            self._writing_ns = time.perf_counter_ns() - start
        if was_queued:
            mail.attendant.summon()

    def advance(self, until_s: float = math.inf) -> MailboxView | None:
        """Do all that can be done now, until `until_s` at most. Returns the mailbox to look at next; None if nothing is left to do."""
        while (come_to := self.step()) is Progress.MORE:
            if time.monotonic() >= min(until_s, self._deadline):
                return self.readers[0]
        return None if come_to is Progress.SETTLED else come_to

    def step(self) -> MailboxView | Progress:
        """Do a piece of the work. Returns the mailbox to look at next if the work waits for a letter."""
        if self._board.is_inherited:  # even here: a handler of a signal may have forked this process while its thread waited
            raise InheritedError(self._board.where())
        while self._asked:
            time.sleep(_LET_IN_S)
        with self._lock:
            if self.is_settled:
                return Progress.SETTLED
            if not self._is_written or self._taken_back:
                return self.readers[0]
            try:
                awaited = next(self._course)
            except StopIteration:
                self._ender = threading.get_ident()
                self._over = True
            except LoanRevoked:
                self._taken_back = True
                return self.readers[0]
            except BaseException as error:  # noqa: BLE001 - the same
                self._break_off(error)
                return Progress.SETTLED
            else:
                if self._given_up:
                    return Progress.SETTLED
                return Progress.MORE if awaited is None else self._mail.views[awaited]
        self._conclude()
        return Progress.SETTLED

    @abstractmethod
    def _run(self) -> Course:
        """All of the work."""

    @abstractmethod
    def _sent(self) -> Mapping[int, int]:
        """Bytes of the caller's data that go to each rank."""

    @abstractmethod
    def _received(self) -> Mapping[int, int]:
        """Bytes of data that have come from each rank."""

    def _send_letter(self) -> None:
        """Send the letter over the streams, as there is no room for it in the mailbox."""
        group = self._mail.group
        self._board.loop.call(group.rounds.announce, self, tuple(self._mail.views), bytes(self._letter))

    def collect(self, of: Collection[int] = ()) -> Course:
        """Find the letters of the ranks `of`, or of all ranks."""
        mail, sequence, last = self._mail, self.sequence, -1
        start = now = time.perf_counter_ns()
        self._since_ns = self._since_ns or start
        while missing := [rank for rank in self._missing if rank in of] if of else self._missing:
            rank = missing[-1]
            letter = mail.views[rank].find(mail.group.id, sequence)
            if letter is None:
                last, self.flight.state = rank, State.WAITING
                yield rank
                now = time.perf_counter_ns()
                continue
            if (note := bytes(letter.note)) != self._note and mail.views[rank].holds(letter):
                self._give_up(mail.group.mismatch, self, rank, note.decode(errors="replace"))
                yield None
            self._letters[rank], self._data[rank] = letter, letter.data
            self._missing.remove(rank)
        self._waited_ns += now - start
        if now - start > LATE_NS:
            mail.group.telemetry.count_wait(mail.group.members[last], start, now)

    def check_letters(self) -> None:
        """Raise LoanRevoked if a letter was taken back, so that the data read so far may not be what was in it."""
        if not all(self._mail.views[rank].holds(letter) for rank, letter in self._letters.items()):
            raise LoanRevoked

    def fail(self, error: BaseException) -> bool:
        """End it with an error on this rank. Returns whether `error` is what ends it: it may have ended before."""
        with self._asking():
            if self._over:
                return False
            self._over = True
            self.error = error
        self._mail.take_back(self.sequence)
        for rank in self._missing:  # ranks that have ended it well left their letters before this rank took its own back
            if (letter := self._find(rank)) is not None:
                self._letters[rank] = letter
        self._conclude()
        for view in self._mail.readers:
            view.wake()
        return True

    def deliver(self, rank: int, data: Buffer) -> None:
        """Take a letter that came over a stream."""
        with self._asking():
            if rank in self._missing:
                self._data[rank] = data
                self._missing.remove(rank)
        self._mail.wake(rank)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Hold the lock on the loop thread, which must not wait until the working thread has finished with it."""
        self._asked = True
        with self._lock:
            self._asked = False
            yield

    def _find(self, rank: int) -> Letter | None:
        """The letter of another rank, if it is there and well-formed."""
        with suppress(ProtocolError):
            return self._mail.views[rank].find(self._mail.group.id, self.sequence)
        return None

    def has_waited(self, now_s: float) -> bool:
        """After a while, tell the others where this rank is. Returns whether the time of the round is over. The first call that finds this
        has the loop thread diagnose it, which ends the round."""
        if now_s < self._deadline:
            if now_s > self._begun_s + REMIND_S and not self.queued:
                self._remind()
            return False
        with self._lock:
            if self._over or self._given_up:
                return False
            self._give_up(self._mail.group.time_out, self)
        return True

    def _give_up(self, function: Callable[..., object], *args: object) -> None:
        """Have the loop thread end it with an error."""
        self._given_up = True
        self._board.loop.call(function, *args)

    def _break_off(self, error: BaseException) -> None:
        """The work has failed: fail the round. Raises `error` if it is for the working thread: a Ctrl-C, which may leave half a result."""
        self._give_up(self._mail.group.fail, self, error)
        if not isinstance(error, Exception):
            self._revoke()
            raise error

    def _remind(self) -> None:
        if not self._reminded:
            self._reminded = True
            self._board.loop.call(self._mail.group.rounds.announce, self, tuple(self._missing))

    def _look(self, timeout_s: float | None) -> float | None:
        """Do the work in this thread, unless another one does it, until the round or the time is over. Returns how much time is left."""
        if self._board.is_inherited and not self.has_ended:
            self._board.check_ours()
        if self._over:
            return timeout_s
        start, here = time.monotonic(), threading.get_ident()
        until_s = math.inf if timeout_s is None else start + timeout_s
        try:
            with self._lock:
                self._looker = self._looker or here
            if self._looker == here:
                self._mail.attendant.leave(self)
                if (view := self.progress(until_s)) is not None:
                    self._wait(view, until_s)
        except BaseException:
            self._mail.group.rounds.tidy()
            raise
        finally:
            if self._looker == here:
                self._looker = None
            if not self.is_settled and not self._board.is_inherited:
                self._mail.attendant.take(self)  # in case the looking thread gives up: other threads may have left the work to it
        return None if timeout_s is None else max(0.0, until_s - time.monotonic())

    def _wait(self, view: MailboxView | None, until_s: float) -> None:
        """Wait for letters, first for one in the mailbox `view`."""
        if not LoopThread.shared().may_block():
            return
        mail, spin_until = self._mail, time.monotonic() + self._mail.spin_s
        while view is not None:
            seen = view.count
            if (current := self.progress(until_s)) is not view:
                view = current
                continue
            now = time.monotonic()
            if now < spin_until:
                give_way()
                continue
            if spin_until:
                mail.learn(in_vain=True)
                spin_until = 0.0
            if self.has_waited(now) or now >= until_s:
                return
            view.wait(seen, min(SLICE_S, self._deadline - now, until_s - now))
        if spin_until:
            mail.learn(in_vain=False)

    def progress(self, until_s: float = math.inf) -> MailboxView | None:
        """`advance`; if the round waits for its turn, advance the rounds before it first."""
        if self.queued:
            self._mail.group.rounds.sweep()
        return self.advance(until_s)

    def _conclude(self) -> None:
        """The round is over: acknowledge the letters, count it, make room for the next one, and, whatever happens, tell whoever waits."""
        mail = self._mail
        try:
            mail.mailbox.acknowledge([(mail.views[rank], letter) for rank, letter in self._letters.items()])
            self._count()
            self._letters, self._data, self._letter, self._course = {}, {}, b"", iter(())
            self._forget()
            mail.attendant.forget(self)
            mail.group.rounds.end(self)
            self._is_concluded = True
        finally:
            if not self.has_ended:
                self.set_result(self.value) if self.error is None else self.set_exception(self.error)

    def tidy(self) -> None:
        """Handle a Ctrl-C in this thread: if this is the thread that has ended the round, conclude it, from the beginning."""
        if self._over and not self._is_concluded and self._ender == threading.get_ident():
            self._conclude()

    def _count(self) -> None:
        """Count the round in the statistics."""
        mail, end = self._mail, time.perf_counter_ns()
        sent, start = self.flight.bytes_sent, (self._since_ns or end) - self._writing_ns
        telemetry, failed = mail.group.telemetry, self.error is not None
        members = mail.group.members
        telemetry.count_near(*({members[rank]: size for rank, size in moved.items()} for moved in (self._sent(), self._received())))
        telemetry.record(self.name, Track.COMMUNICATION, start, end, sent)
        telemetry.count_op(self.call.op, self.call.label, start, end, sent, waited_ns=self._waited_ns, failed=failed)
        telemetry.flights.end(self.flight, end, self.error)

    def _revoke(self) -> None:
        """Called when the caller is about to get back memory that the others may be reading."""

    def _forget(self) -> None:
        """Drop what only the work needs."""
