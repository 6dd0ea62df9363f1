"""`Attendant`: the thread that looks after rounds for which no thread waits (MPI calls this a progress thread), a step of each in turn.

Most rounds are waited for as soon as they have begun, and waking the attendant for those took a tenth of their processor time: it wakes up,
wants the interpreter (the GIL), and finds nothing to do. So while it has no rounds it sleeps by an alarm, which is set when a round begins,
and disarmed when a thread waits for that round.
"""

import logging
import threading
import time
from collections.abc import Mapping
from itertools import islice

from shardnet.collectives.letters.round import Progress, Round
from shardnet.loop import help_out
from shardnet.transport.shared_memory import Alarm, Bell, MailboxView, futex

log = logging.getLogger(__name__)

MOMENT_S = 0.0002  # how long the caller that begins a round has to start waiting for it
SLICE_S = 0.05  # the longest sleep while there are rounds: timeouts are noticed after it
BETWEEN_S = 0.0005  # the sleep where a thread can wait at one word only (before Linux 5.16), so no mailbox wakes it; it grows to the next
MOST_BETWEEN_S = 0.005


class Attendant:
    """One for all groups of a rank, until it is closed. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._bell = Bell()
        self._lock = threading.Lock()  # over what follows
        self._alarm = Alarm(MOMENT_S)  # until it is closed
        self._asleep = False  # the thread sleeps by the alarm, or is about to; if not, it sleeps by the bell
        self._rounds: dict[Round, None] = {}  # in the order in which they came
        self._idle_since = 0.0  # when a round last came or ended
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def take(self, given: Round) -> None:
        """Look after a round until it ends."""
        with self._lock:
            if self._closed:
                return
            if is_asleep := self._asleep:
                self._alarm.ring()  # first: a Ctrl-C may come in between, and a needless alarm does no harm
            self._rounds[given] = None
            self._idle_since = time.monotonic()
            if is_asleep:
                return
        self.summon()  # even if it has the round already: a thread that waited for the round meanwhile may have stopped

    def expect(self, given: Round) -> None:
        """Look after a round until it ends, unless a thread waits for it within a moment."""
        with self._lock:
            if self._asleep and not self._closed:
                if not self._rounds:
                    self._alarm.set()
                self._rounds[given] = None
                return
        self.take(given)

    def leave(self, given: Round) -> None:
        """A thread waits for the round now: it needs no attendant."""
        with self._lock:
            if self._asleep and given in self._rounds:
                del self._rounds[given]
                if not self._rounds:
                    self._alarm.disarm()

    def summon(self) -> None:
        """Wake it: one of its rounds can go on, although no other rank's mailbox says so."""
        if not self._asleep:  # otherwise it looks at all of them when it wakes up
            self._bell.ring()

    def forget(self, ended: Round) -> None:
        """Drop a round that has ended, so that its result is not kept when nobody else holds it."""
        with self._lock:
            self._rounds.pop(ended, None)

    def close(self) -> None:
        """End the thread: all rounds have ended, or somebody else ends them."""
        with self._lock:
            self._closed = True
            self._rounds.clear()
            if self._asleep:
                self._alarm.ring()
        self.summon()

    def _run(self) -> None:
        help_out()
        while not self._closed:
            heard = self._bell.count  # before it looks around
            missing = self._take_turn()
            if self._may_sleep():
                self._alarm.sleep()
                self._asleep = False
            elif missing is not None:
                self._listen(heard, missing)
        with self._lock:
            self._alarm.close()

    def _may_sleep(self) -> bool:
        """Whether there is nothing to look after."""
        with self._lock:
            self._asleep = not self._rounds and not self._closed
            return self._asleep

    def _take_turn(self) -> Mapping[MailboxView, int] | None:
        """Do a step of each round. Returns the mailboxes that rounds wait for, each with its count before it was looked at; None if there
        is more to do at once. No reference to a round is kept."""
        with self._lock:
            rounds = list(self._rounds)
        missing: dict[MailboxView, int] = {}
        now = time.monotonic()
        can_go_on = sum(self._attend(each, now, missing) for each in rounds) > 0  # not any(): every round gets its step
        with self._lock:
            for each in rounds:
                if each.is_settled or each.is_waited_for:  # a thread that stops waiting for it gives it back
                    self._rounds.pop(each, None)
            self._idle_since = self._idle_since if len(self._rounds) == len(rounds) else now
        return None if can_go_on else missing

    def _attend(self, each: Round, now: float, missing: dict[MailboxView, int]) -> bool:
        """Do a step of a round. Returns whether the next step can follow at once."""
        if each.is_settled or each.is_waited_for:
            return False
        if each.queued:  # the rounds before it are with the attendant, too, or a thread waits for them
            each.has_waited(now)
            return False
        seen = {view: view.count for view in each.readers}
        try:
            come_to = each.step()
        except BaseException:
            log.exception("a callback at the end of %s has failed", each.name)
            return False
        if isinstance(come_to, MailboxView) and not each.has_waited(now):
            missing.setdefault(come_to, seen[come_to])
        return come_to is Progress.MORE

    def _listen(self, heard: int, missing: Mapping[MailboxView, int]) -> None:
        """Sleep until a round may be able to go on."""
        audible = dict(islice(missing.items(), futex.most - 1))
        if len(audible) == len(missing):
            self._bell.wait(heard, audible, SLICE_S)
        else:
            self._bell.wait(heard, audible, min(MOST_BETWEEN_S, BETWEEN_S + (time.monotonic() - self._idle_since) / 20))
