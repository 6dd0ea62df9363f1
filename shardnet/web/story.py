"""`Story`: everything that was seen of a cluster since the watching began."""

import secrets

from shardnet.observation.chronicle import KEPT, Chronicle, Event
from shardnet.observation.rates import RateMeter
from shardnet.observation.views import OVER, ClusterView
from shardnet.web.history import History

MAX_HISTORIES = 32  # of jobs; 10 MB. A rendezvous may know more jobs, including finished ones


class Story:
    """The last look, and the points and events of earlier ones; bounded. Lives as long as the page is served.

    Looks are numbered from 1 on. `run` distinguishes this story from that of another process at the same address.
    """

    def __init__(self) -> None:
        self.run = secrets.token_hex(4)
        self.number = 0
        self.at_s = 0.0
        self.view: ClusterView | None = None
        self.meter = RateMeter()
        self.histories: dict[str, History] = {}
        self._chronicle = Chronicle()
        self._events: list[tuple[int, Event]] = []  # with the number of the look

    def add(self, at_s: float, now_s: float, view: ClusterView) -> None:
        """Add the next look, at `at_s` since 1970 and at `now_s` of a clock that never goes back."""
        self.number += 1
        self.at_s, self.view = at_s, view
        self.meter.add(now_s, view)
        self._chronicle.add(at_s, view)
        self._events = [*self._events, *((self.number, event) for event in self._chronicle.take_new())][-KEPT:]
        self._make_room(view)
        for job in view.jobs:
            if job.job in self.histories:
                self.histories[job.job].add(self.number, at_s, now_s, job, self.meter)

    def events(self, since: int) -> list[tuple[int, Event]]:
        """The events of looks after `since`, the newest last."""
        return [each for each in self._events if each[0] > since]

    def _make_room(self, view: ClusterView) -> None:
        """Drop histories: each known job has one, and if there are too many jobs, running ones come first."""
        by_worth = sorted(view.jobs, key=lambda job: job.state in OVER)
        kept = {job.job for job in by_worth[:MAX_HISTORIES]}
        self.histories = {name: self.histories.get(name) or History() for name in kept}
