"""`Attendant`: the thread that looks after rounds for which no thread waits, a step of each in turn."""

import logging
import threading
import time
from itertools import islice

from shardnet.collectives.mail import Progress, Round
from shardnet.loop import help_out
from shardnet.transport.shared_memory import MailboxView, futex

log = logging.getLogger(__name__)

SLICE_S = 0.005  # the longest sleep: a round that is given to it when it begins is seen behind it
BETWEEN_S = 0.0005  # where several mailboxes are waited at, and the system lets sleep at one only (before Linux 5.16); more with time


class Attendant:
    """One for all groups of a rank, until it is closed. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._rounds: dict[Round, None] = {}  # in the order in which they came
        self._sleeps_at: MailboxView | None = None
        self._idle_since = 0.0  # since when no round has come or ended
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def take(self, given: Round) -> None:
        """See to it that it ends."""
        with self._changed:
            if self._closed or given in self._rounds:
                return
            self._rounds[given] = None
            self._changed.notify()
            if self._sleeps_at is not None:
                self._sleeps_at.wake()

    def close(self) -> None:
        """All rounds have ended, or somebody else ends them."""
        with self._changed:
            self._closed = True
            self._rounds.clear()
            self._changed.notify()

    def _run(self) -> None:
        help_out()
        while not self._closed:
            with self._changed:
                self._sleeps_at = None
                while not self._rounds and not self._closed:
                    self._changed.wait()
            self._take_turn()

    def _take_turn(self) -> None:
        """A step of each round, and wait if there is nothing more to do at once. It keeps none of them."""
        with self._changed:
            rounds = list(self._rounds)
        missing: dict[MailboxView, int] = {}  # where something is waited for, and what was the count before it was looked for
        now = time.monotonic()
        can_go_on = sum(self._attend(each, now, missing) for each in rounds) > 0  # of all of them
        with self._changed:
            for each in rounds:
                if each.is_settled or each.is_waited_for:  # who stops waiting for it gives it back
                    self._rounds.pop(each, None)
            self._idle_since = self._idle_since if len(self._rounds) == len(rounds) else now
            if self._rounds and not missing and not can_go_on and not self._closed:  # they wait for rounds that a thread waits for
                self._changed.wait(SLICE_S)
        if missing and not can_go_on:
            self._sleep(missing, now - self._idle_since)

    def _attend(self, each: Round, now: float, missing: dict[MailboxView, int]) -> bool:
        """Do a step of it. Returns whether the next one can follow at once."""
        if each.is_settled or each.is_waited_for:
            return False
        if each.queued:  # those before it are here, too, or a thread waits for them
            each.has_waited(now)
            return False
        seen = {view: view.count for view in each.readers}
        try:
            come_to = each.step()
        except BaseException:
            log.exception("what was to be called at the end of %s has failed", each.name)
            return False
        if isinstance(come_to, MailboxView) and not each.has_waited(now):
            missing.setdefault(come_to, seen[come_to])
        return come_to is Progress.MORE

    def _sleep(self, missing: dict[MailboxView, int], idle_s: float) -> None:
        heard = dict(islice(missing.items(), futex.most))
        self._sleeps_at = next(iter(heard))
        MailboxView.wait_for_any(heard, SLICE_S if len(heard) == len(missing) else min(SLICE_S, BETWEEN_S + idle_s / 20))
