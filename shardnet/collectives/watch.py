"""`Watch`: notices collectives that wait for long, and says which ranks they wait for.

[Note: the watch] Nothing is sent or counted for a collective that goes well. One timer for all groups of a rank runs while any collective
is under way, and looks when the oldest could be late. Only if it is late does the watch ask the other ranks where they are (see
`RollCall`). It asks about the oldest late collective of each group, since later ones wait for the same ranks, and only about a few of the
groups that are alike, such as thousands of sends to one rank. It asks again every `suspect_s`, or every second until what it found is in
the log, so that the status of this rank is up to date. A collective that all ranks have entered is not stuck, only slow, and is not asked
about again. Whether a caller on this rank already waits for it makes no difference.
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

PATIENT_S = 3600.0  # a caller that allows a collective so long expects others to be late: the status says so, but the log does not
ALIKE = 4  # how many groups of the same ranks in the same call are asked about: those that would time out first
LINE_EVERY_S = 1.0  # at most one line in the log: several groups mostly wait for the same rank


class Watch:
    """One for all groups of a rank, until it is closed. Runs on the loop thread, except `begin`."""

    def __init__(self, board: "Switchboard", suspect_s: float) -> None:
        self._board = board
        self._suspect_s = suspect_s
        self._armed = False  # the timer runs, or other ranks are being asked; written on the loop thread only
        self._timer: asyncio.TimerHandle | None = None
        self._asking: asyncio.Task[None] | None = None
        self._entered_below: dict[int, int] = {}  # by group: all ranks have entered its collectives with lower numbers
        self._told: set[Flight] = set()
        self._told_s = 0.0  # when the last log line was written

    def begin(self) -> None:
        """Watch, as a collective is under way now. Any thread."""
        if not self._armed:
            self._board.loop.call(self._arm)

    def close(self) -> None:
        """Stop watching: everything that was under way has ended."""
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
        self._armed = False  # before looking: a collective that begins later arms it, and one that began before is seen
        ages = [age for group in self._board.groups if (age := self._age(group)) is not None]
        if not ages:
            self._board.telemetry.waiting = ()
        elif max(ages) < self._suspect_s:
            self._set(self._suspect_s - max(ages))
        else:
            self._armed = True
            self._asking = self._board.loop.loop.create_task(self._ask())  # not one of the board's tasks, which closing waits for

    def _age(self, group: "Group") -> float | None:
        """Seconds since the oldest collective that may be stuck was entered."""
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
        """The groups to ask about."""
        alike: defaultdict[object, list[tuple[float, int, Group]]] = defaultdict(list)
        for group in self._board.groups:
            if (oldest := self._oldest(group)) is not None and self._is_late(oldest):
                end_ns = oldest.flight.entered_ns + oldest.call.timeout_s * 1e9
                alike[group.members, oldest.call.on_the_wire].append((end_ns, group.id, group))
        return (group for groups in alike.values() for _, _, group in nsmallest(ALIKE, groups))

    def _is_late(self, each: "Operation | Round") -> bool:
        return time.perf_counter_ns() - each.flight.entered_ns >= self._suspect_s * 1e9

    async def _examine(self, group: "Group") -> Waiting | None:
        """The oldest late collective of a group, with the ranks that it waits for; None if it waits for none."""
        while (oldest := self._oldest(group)) is not None and self._is_late(oldest):
            attendance = await group.roll_call.hold(oldest.sequence)
            self._entered_below[group.id] = max(attendance.entered_below, self._entered_below.get(group.id, 0))
            if attendance.absent:
                if oldest.call.timeout_s >= PATIENT_S:
                    self._told.add(oldest.flight)
                return Waiting(oldest.flight, attendance.absent)
            if attendance.busy:
                return None  # data moves, so no rank is stuck: ask again later
        return None

    def _tell(self, waiting: tuple[Waiting, ...]) -> int:
        """Write at most one line. Returns how many collectives are left for later lines."""
        self._told = {flight for flight in self._told if not flight.ended_ns}
        untold = sorted((each for each in waiting if each.flight not in self._told), key=lambda each: each.flight.entered_ns)
        if untold and time.monotonic() - self._told_s >= LINE_EVERY_S:
            first = untold.pop(0)
            self._told.add(first.flight)
            self._told_s = time.monotonic()
            log.warning("%s %s", self._board.where(), str(first))  # formatted now, as the seconds in it go on counting
        return len(untold)
