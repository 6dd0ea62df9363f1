"""`Attendant`: the thread that looks after rounds for which no thread waits, a step of each in turn."""

import logging
import threading
import time
from collections.abc import Mapping
from itertools import islice

from shardnet.collectives.mail import Progress, Round
from shardnet.loop import help_out
from shardnet.transport.shared_memory import Bell, MailboxView, futex

log = logging.getLogger(__name__)

SLICE_S = 0.05  # the longest sleep while there are rounds: what a timeout has ended is seen behind it
CALM_S = 60.0  # the same while there are none
BETWEEN_S = 0.0005  # where the system lets sleep at one word only (before Linux 5.16): at none of the others; more with time
MOST_BETWEEN_S = 0.005


class Attendant:
    """One for all groups of a rank, until it is closed. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._bell = Bell()
        self._lock = threading.Lock()
        self._rounds: dict[Round, None] = {}  # in the order in which they came
        self._idle_since = 0.0  # since when no round has come or ended
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def take(self, given: Round) -> None:
        """See to it that it ends."""
        with self._lock:
            if self._closed:
                return
            self._rounds[given] = None
            self._idle_since = time.monotonic()
        self.summon()  # also if it has it: a thread that waited for it meanwhile does no more

    def summon(self) -> None:
        """One of its rounds can go on, though no mailbox of another rank says so."""
        self._bell.ring()

    def forget(self, ended: Round) -> None:
        """It keeps no result that nobody else has any more."""
        with self._lock:
            self._rounds.pop(ended, None)

    def close(self) -> None:
        """All rounds have ended, or somebody else ends them."""
        with self._lock:
            self._closed = True
            self._rounds.clear()
        self.summon()

    def _run(self) -> None:
        help_out()
        while not self._closed:
            heard = self._bell.count  # before it looks around
            missing = self._take_turn()
            if missing is not None and not self._closed:
                self._sleep(heard, missing)

    def _take_turn(self) -> Mapping[MailboxView, int] | None:
        """A step of each round. Returns where something is waited for, and what was the count before it was looked for; None if there is
        more to do at once. It keeps none of the rounds."""
        with self._lock:
            rounds = list(self._rounds)
        missing: dict[MailboxView, int] = {}
        now = time.monotonic()
        can_go_on = sum(self._attend(each, now, missing) for each in rounds) > 0  # of all of them
        with self._lock:
            for each in rounds:
                if each.is_settled or each.is_waited_for:  # who stops waiting for it gives it back
                    self._rounds.pop(each, None)
            self._idle_since = self._idle_since if len(self._rounds) == len(rounds) else now
        return None if can_go_on else missing

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

    def _sleep(self, heard: int, missing: Mapping[MailboxView, int]) -> None:
        audible = dict(islice(missing.items(), futex.most - 1))
        if len(audible) == len(missing):
            self._bell.wait(heard, audible, SLICE_S if self._rounds else CALM_S)
        else:
            self._bell.wait(heard, audible, min(MOST_BETWEEN_S, BETWEEN_S + (time.monotonic() - self._idle_since) / 20))
