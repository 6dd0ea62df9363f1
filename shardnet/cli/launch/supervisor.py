"""`Supervisor`: the workers of one launch, which end together when one fails; for elastic jobs see [Note: elastic].

[Note: two-stage stop] The first signal from the user is passed on: workers finish their step and leave in their own
time. The second kills them. After either signal no worker is replaced.
"""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from shardnet.cli.launch.failure import Exit, culprit, last_straw
from shardnet.cli.launch.recovery import Recovery

SETTLE_S = 3.0  # how long the culprit may take to print its error after a peer has noticed that it is gone; at most the grace
LATE_S = 30.0  # so long after the others have ended it is told which workers still run: one may be stuck, and nobody waits for it any more


class _Stage(Enum):
    RUNNING = auto()  # no worker has failed, or the job can go on without it; waits for each to end
    STOPPING = auto()  # the user asked once; the workers may take as long as they need. KILLED comes next
    SETTLING = auto()  # a worker failed because it lost a peer, whose own error has not come yet. TERMINATING comes next
    TERMINATING = auto()  # a worker failed and the rest got SIGTERM. KILLED comes next
    KILLED = auto()  # the rest got SIGKILL; final


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a launch ended. `status` is the exit status for it; `failure` is told to the user."""

    status: int
    failure: Exit | None = None
    ended_with_it: int = 0  # workers that had to be ended because of the failure
    too_few: bool = False  # an elastic job could not go on after it
    lost: Sequence[Exit] = ()  # failures that an elastic job has survived
    replaced: Sequence[Exit] = ()  # failures after which another worker was started


class Supervised(Protocol):
    """Starts workers and passes signals on to the one that runs: a `Place`."""

    @property
    def label(self) -> str: ...

    async def run(self) -> Exit: ...

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


class Supervisor:
    """Runs each place's worker.

    grace_s   when a worker has failed: the time from SIGTERM to SIGKILL for the others
    say       tells the user a line
    recovery  of an elastic job, see [Note: elastic]; None: the first failure ends all
    """

    def __init__(
        self,
        places: Sequence[Supervised],
        *,
        grace_s: float,
        say: Callable[[str], None],
        recovery: Recovery | None = None,
        late_s: float = LATE_S,
    ) -> None:
        self._places = places
        self._filled = list(places)  # places that have a worker or will have one
        self._recovery = recovery
        self._say = say
        self._late_s = late_s
        self._late: asyncio.TimerHandle | None = None  # since a worker has succeeded
        self._limits_s = {_Stage.SETTLING: min(SETTLE_S, grace_s), _Stage.TERMINATING: grace_s}
        self._stage = _Stage.RUNNING
        self._escalation: asyncio.TimerHandle | None = None  # for stages with a time limit
        self._stopped_by: int | None = None
        self._leaving = asyncio.Event()  # the stage is no longer RUNNING
        self._exits: list[Exit] = []  # those after which no other worker was started
        self._replaced: list[Exit] = []

    async def run(self) -> Verdict:
        """Start all, return when all have ended. Cancelling kills them. Raises OSError if one cannot be started."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in self._places:
                    tasks.create_task(self._fill(place))
        finally:
            self._cancel_escalation()
            if self._late is not None:
                self._late.cancel()
        return self._verdict()

    def stop(self, number: int) -> None:
        """Pass the user's signal on; the second time kill. See [Note: two-stage stop]."""
        if self._stage is _Stage.RUNNING:
            self._stopped_by = number
            self._enter(_Stage.STOPPING)
            # a closed terminal (SIGHUP) also means to stop, but programs seldom handle it so
            self._signal_all(signal.SIGTERM if number == signal.SIGHUP else number)
        else:
            self._kill_all()

    @property
    def stopping(self) -> bool:
        return self._stage is not _Stage.RUNNING

    async def _fill(self, place: Supervised) -> None:
        """Run the place's worker, and the workers that replace it."""
        while (ended := await place.run()).failed and await self._replace(place, ended):
            self._replaced.append(ended)
        self._exits.append(ended)
        self._filled.remove(place)
        if not ended.failed:
            if self._late is not None:
                self._late.cancel()
            self._late = asyncio.get_running_loop().call_later(self._late_s, self._say_who_is_late)

    def _say_who_is_late(self) -> None:
        if self._stage is _Stage.RUNNING:
            late = " and ".join(place.label for place in self._filled)
            run, them = ("run", "them") if len(self._filled) > 1 else ("runs", "it")
            self._say(f"{late} still {run}, {self._late_s:g} s after the last of the others has ended; Ctrl-C asks {them} to end")

    async def _replace(self, place: Supervised, failure: Exit) -> bool:
        """React to a failure. Returns True when it is time to start a new worker in the place, False if none should start."""
        if self._recovery is not None and self._stage is _Stage.RUNNING and not failure.is_final:
            others = len(self._places) - len(self._exits) - 1
            done = sum(not end.failed for end in self._exits)
            pause_s = None if done else self._recovery.replace(place, failure, others)  # one success means that all is done
            if pause_s is not None:
                return await self._pause(pause_s)
            if self._recovery.go_on(failure, others, done):
                return False
        self._end_all(failure)
        return False

    async def _pause(self, pause_s: float) -> bool:
        """Wait; returns whether the launch still goes on afterwards."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._leaving.wait()
        return self._stage is _Stage.RUNNING

    def _end_all(self, failure: Exit) -> None:
        if self._stage not in (_Stage.RUNNING, _Stage.SETTLING):
            return
        if not failure.is_consequence:
            self._terminate_all()
        elif self._stage is _Stage.RUNNING:
            self._enter(_Stage.SETTLING)

    def _escalate(self) -> None:
        if self._stage is _Stage.SETTLING:
            self._terminate_all()
        else:
            self._kill_all()

    def _terminate_all(self) -> None:
        self._enter(_Stage.TERMINATING)
        self._signal_all(signal.SIGTERM)

    def _signal_all(self, number: int) -> None:
        for place in self._places:
            place.signal(number)

    def _kill_all(self) -> None:
        self._enter(_Stage.KILLED)
        for place in self._places:
            place.kill()

    def _enter(self, stage: _Stage) -> None:
        self._stage = stage
        self._leaving.set()
        self._cancel_escalation()
        if stage in self._limits_s:
            self._escalation = asyncio.get_running_loop().call_later(self._limits_s[stage], self._escalate)

    def _cancel_escalation(self) -> None:
        if self._escalation is not None:
            self._escalation.cancel()

    def _verdict(self) -> Verdict:
        if self._stopped_by is not None:
            return Verdict(128 + self._stopped_by)
        if self._stage is _Stage.RUNNING and not all(end.failed for end in self._exits):
            return Verdict(0, lost=[end for end in self._exits if end.failed], replaced=self._replaced)
        failure = culprit(self._exits) if self._recovery is None else last_straw(self._exits)
        if failure is None:
            return Verdict(0)
        too_few = self._recovery is not None and self._stage is not _Stage.RUNNING and not failure.is_final
        return Verdict(failure.status, failure, sum(end.was_ended for end in self._exits), too_few)
