"""`Attendant`: the thread that looks after rounds for which no thread waits."""

import threading
import time

from shardnet.collectives.mail import REMIND_S, Round
from shardnet.transport.shared_memory import MailboxView

SLICE_S = 0.005  # the longest sleep: a round that is given to it when it begins is seen behind it
BETWEEN_S = 0.0005  # where letters of several ranks are waited for, of which only one can be slept for


class Attendant:
    """One for all groups of a rank, until it is closed. Any thread may call it."""

    def __init__(self, name: str) -> None:
        self._changed = threading.Condition()
        self._rounds: dict[Round, float] = {}  # and since when
        self._sleeps_at: MailboxView | None = None
        self._closed = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def take(self, given: Round) -> None:
        """See to it that it ends."""
        with self._changed:
            if self._closed or given in self._rounds:
                return
            self._rounds[given] = time.monotonic()
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
        while True:
            with self._changed:
                self._sleeps_at = None
                while not self._rounds and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                rounds = dict(self._rounds)
            missing: dict[MailboxView, int] = {}  # where letters are waited for, and what was the count before they were looked for
            now = time.monotonic()
            for each, since in rounds.items():
                if not self._attend(each, now, now > since + REMIND_S, missing):
                    with self._changed:
                        self._rounds.pop(each, None)
            if missing:
                self._sleep(missing)

    def _attend(self, each: Round, now: float, is_long: bool, missing: dict[MailboxView, int]) -> bool:
        """Whether there is more to do for it."""
        seen = {view: view.count for view in each.readers}
        view = each.progress()
        if view is None or each.is_late(now):
            return False
        if is_long:
            each.remind()
        missing.setdefault(view, seen[view])
        return True

    def _sleep(self, missing: dict[MailboxView, int]) -> None:
        view, seen = next(iter(missing.items()))
        self._sleeps_at = view
        view.wait(seen, SLICE_S if len(missing) == 1 else BETWEEN_S)
