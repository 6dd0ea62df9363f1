"""`Watch`: notices collectives that wait for long, and says for whom.

[Note: the watch] Nothing is sent or counted for a collective that goes well: one timer for all groups of a rank runs while there are any
under way, and looks when the oldest could be late. Only then does it ask the other ranks where they are (see `RollCall`), for the
oldest late one of each group, since the later ones wait for the same, and for few of groups that are alike, as thousands of sends to one
rank are; and asks again each `suspect_s`, so that who wants to know how the rank is doing hears what is true now. A collective that all
have entered is not stuck, only slow, and not asked for again. Whether this rank itself waits for it yet makes no difference.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from heapq import nsmallest
from typing import TYPE_CHECKING

from shardnet.collectives.operation import Operation
from shardnet.flight import Flight
from shardnet.waiting import Waiting

if TYPE_CHECKING:
    from shardnet.collectives.group import Group
    from shardnet.collectives.letters.round import Round
    from shardnet.collectives.switchboard import Switchboard

log = logging.getLogger(__name__)

PATIENT_S = 3600.0  # who gives a collective so long expects others to be late: the status says so, and no line in the log
ALIKE = 4  # groups of the same ranks in the same call that are asked for: those that would time out first
LINE_EVERY_S = 1.0  # in the log: what several groups wait for is mostly the same rank


class Watch:
    """One for all groups of a rank, until it is closed. Runs on the loop thread, but for `begin`."""

    def __init__(self, board: "Switchboard", suspect_s: float) -> None:
        self._board = board
        self._suspect_s = suspect_s
        self._armed = False  # the timer runs, or somebody is being asked; written on the loop thread only
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._entered_below: dict[int, int] = {}  # by group: all ranks have entered its collectives with lower numbers
        self._told: set[Flight] = set()
        self._told_s = 0.0  # when the last line was written

    def begin(self) -> None:
        """A collective is under way. Any thread."""
        if not self._armed:
            self._board.loop.call(self._arm)

    def close(self) -> None:
        """Whatever is under way has been ended."""
        self._armed = True  # for good
        self._board.telemetry.waiting = ()
        for each in (self._timer, self._asking):
            if each is not None:
                each.cancel()

    def _arm(self) -> None:
        if not self._armed:
            self._set(self._suspect_s)

    def _set(self, delay_s: float) -> None:
        self._armed = True
        self._timer = self._board.loop.loop.call_later(delay_s, self._look)

    def _look(self) -> None:
        self._armed = False  # before looking: what begins later arms it, and what began before is seen
        ages = [age for group in self._board.groups if (age := self._age(group)) is not None]
        if not ages:
            self._board.telemetry.waiting = ()
        elif max(ages) < self._suspect_s:
            self._set(self._suspect_s - max(ages))
        else:
            self._armed = True
            self._asking = self._board.loop.loop.create_task(self._ask())  # none of the board's, which closing waits for

    def _age(self, group: "Group") -> float | None:
        """Seconds since the oldest collective was entered that may be stuck."""
        oldest = self._oldest(group)
        return None if oldest is None else (time.perf_counter_ns() - oldest.flight.entered_ns) / 1e9

    def _oldest(self, group: "Group") -> "Operation | Round | None":
        known = self._entered_below.get(group.id, 0)
        suspects = (each for each in group.under_way if each.sequence >= known and each.flight.entered_ns and each.may_be_stuck)
        return min(suspects, key=lambda each: each.sequence, default=None)

    async def _ask(self) -> None:
        answers = await asyncio.gather(*map(self._examine, self._late()))
        waiting = tuple(each for each in answers if each is not None and not each.is_over)
        self._board.telemetry.waiting = waiting
        self._board.telemetry.stalls.note(waiting)
        untold = self._tell(waiting)
        self._set(min(self._suspect_s, LINE_EVERY_S) if untold else self._suspect_s)

    def _late(self) -> "Iterator[Group]":
        """The groups to ask for."""
        alike: defaultdict[object, list[tuple[float, int, Group]]] = defaultdict(list)
        for group in self._board.groups:
            if (oldest := self._oldest(group)) is not None and self._is_late(oldest):
                end_ns = oldest.flight.entered_ns + oldest.call.timeout_s * 1e9
                alike[group.members, oldest.call.on_the_wire].append((end_ns, group.id, group))
        return (group for groups in alike.values() for _, _, group in nsmallest(ALIKE, groups))

    def _is_late(self, each: "Operation | Round") -> bool:
        return time.perf_counter_ns() - each.flight.entered_ns >= self._suspect_s * 1e9

    async def _examine(self, group: "Group") -> Waiting | None:
        """The oldest collective of a group that waits for somebody for long."""
        while (oldest := self._oldest(group)) is not None and self._is_late(oldest):
            attendance = await group.roll_call.hold(oldest.sequence)
            self._entered_below[group.id] = max(attendance.entered_below, self._entered_below.get(group.id, 0))
            if attendance.absent:
                if oldest.call.timeout_s >= PATIENT_S:
                    self._told.add(oldest.flight)
                return Waiting(oldest.flight, attendance.absent)
            if attendance.busy:
                return None  # data moves, so nobody is stuck: they are asked again
        return None

    def _tell(self, waiting: tuple[Waiting, ...]) -> int:
        """Write at most one line. Returns how many are left for later ones."""
        self._told = {flight for flight in self._told if not flight.ended_ns}
        untold = sorted((each for each in waiting if each.flight not in self._told), key=lambda each: each.flight.entered_ns)
        if untold and time.monotonic() - self._told_s >= LINE_EVERY_S:
            first = untold.pop(0)
            self._told.add(first.flight)
            self._told_s = time.monotonic()
            log.warning("%s %s", self._board.where(), str(first))  # now: its seconds go on
        return len(untold)
