"""`Supervisor`: the workers of one launch, which end together.

[Note: two-stage stop] The first signal from the user is passed on: workers finish their step and leave in their own
time. The second kills them.
"""

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from shardnet.cli.launch.failure import Exit, culprit

SETTLE_S = 3.0  # how long the culprit may take to print its error after a peer has noticed that it is gone; at most the grace


class _Stage(Enum):
    RUNNING = auto()  # no worker has failed; waits for each to end
    STOPPING = auto()  # the user asked once; the workers may take as long as they need. KILLED comes next
    SETTLING = auto()  # a worker failed because it lost a peer, whose own error is still to come. TERMINATING comes next
    TERMINATING = auto()  # a worker failed and the rest got SIGTERM. KILLED comes next
    KILLED = auto()  # the rest got SIGKILL; final


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a launch ended. `status` is the exit status that says so; `failure` is told to the user."""

    status: int
    failure: Exit | None = None
    ended_with_it: int = 0  # workers that had to be ended because of the failure


class Supervised(Protocol):
    """What starts workers and passes signals on to the one that runs: a `Place`."""

    async def run(self) -> Exit: ...

    def signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


class Supervisor:
    """Runs each place's worker.

    grace_s  when one has failed: from SIGTERM to SIGKILL for the others
    """

    def __init__(self, places: Sequence[Supervised], *, grace_s: float) -> None:
        self._places = places
        self._limits_s = {_Stage.SETTLING: min(SETTLE_S, grace_s), _Stage.TERMINATING: grace_s}
        self._stage = _Stage.RUNNING
        self._escalation: asyncio.TimerHandle | None = None  # for stages that last only so long
        self._stopped_by: int | None = None
        self._exits: list[Exit] = []

    async def run(self) -> Verdict:
        """Start all, return when all have ended. Cancelling kills them. Raises OSError if one cannot be started."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in self._places:
                    tasks.create_task(self._fill(place))
        finally:
            self._cancel_escalation()
        return self._verdict()

    def stop(self, number: int) -> None:
        """Pass the user's signal on; the second time kill. See [Note: two-stage stop]."""
        if self._stage is _Stage.RUNNING:
            self._stopped_by = number
            self._enter(_Stage.STOPPING)
            # a closed terminal (SIGHUP) is a wish to stop, too, but programs seldom take it for one
            self._signal_all(signal.SIGTERM if number == signal.SIGHUP else number)
        else:
            self._kill_all()

    @property
    def stopping(self) -> bool:
        return self._stage is not _Stage.RUNNING

    async def _fill(self, place: Supervised) -> None:
        ended = await place.run()
        self._exits.append(ended)
        if ended.failed:
            self._on_failure(ended)

    def _on_failure(self, failure: Exit) -> None:
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
        self._cancel_escalation()
        if stage in self._limits_s:
            self._escalation = asyncio.get_running_loop().call_later(self._limits_s[stage], self._escalate)

    def _cancel_escalation(self) -> None:
        if self._escalation is not None:
            self._escalation.cancel()

    def _verdict(self) -> Verdict:
        if self._stopped_by is not None:
            return Verdict(128 + self._stopped_by)
        failure = culprit(self._exits)
        if failure is None:
            return Verdict(0)
        return Verdict(failure.status, failure, sum(end.was_ended for end in self._exits))
