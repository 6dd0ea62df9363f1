"""`Attendant`: the thread that looks after rounds for which no thread waits."""

import logging
import threading
import time

from shardnet.collectives.mail import Round
from shardnet.loop import help_out
from shardnet.transport.shared_memory import MailboxView

log = logging.getLogger(__name__)

SLICE_S = 0.005  # the longest sleep: a round that is given to it when it begins is seen behind it
BETWEEN_S = 0.0005  # where letters of several ranks are waited for, of which only one can be slept for; more with time


class Attendant:
    """One for all groups of a rank, until it is closed. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._rounds: dict[Round, None] = {}  # in the order in which they came
        self._sleeps_at: MailboxView | None = None
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
        idle_since = 0.0  # since when no round has come or ended
        while True:
            with self._changed:
                self._sleeps_at = None
                while not self._rounds and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                rounds = list(self._rounds)
            before = len(rounds)
            missing: dict[MailboxView, int] = {}  # where letters are waited for, and what was the count before they were looked for
            now = time.monotonic()
            for each in rounds:
                if not self._attend(each, now, missing):
                    with self._changed:
                        self._rounds.pop(each, None)
            with self._changed:
                idle_since = idle_since if len(self._rounds) == before else now
            if missing:
                self._sleep(missing, now - idle_since)

    def _attend(self, each: Round, now: float, missing: dict[MailboxView, int]) -> bool:
        """Whether there is more to do for it."""
        if each.is_settled:
            return False
        if each.queued:  # those before it are here, too
            return not each.has_waited(now)
        seen = {view: view.count for view in each.readers}
        try:
            view = each.advance()
        except BaseException:
            log.exception("what was to be called at the end of %s has failed", each.name)
            return False
        if view is None or each.has_waited(now):
            return False
        missing.setdefault(view, seen[view])
        return True

    def _sleep(self, missing: dict[MailboxView, int], idle_s: float) -> None:
        view, seen = next(iter(missing.items()))
        self._sleeps_at = view
        view.wait(seen, SLICE_S if len(missing) == 1 else min(SLICE_S, BETWEEN_S + idle_s / 20))
