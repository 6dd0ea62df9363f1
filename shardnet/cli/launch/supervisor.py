"""`Supervisor`: the workers of one launch, which end together.

[Note: two-stage stop] The first signal from the user is passed on: workers finish their step and leave in their own
time. The second kills them.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from shardnet.cli.launch.failure import Exit, culprit
from shardnet.cli.launch.worker import Worker

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


class Supervisor:
    """Runs each worker once.

    starts   for each worker a function that runs it: Worker.run with its command line and environment
    grace_s  when one has failed: from SIGTERM to SIGKILL for the others
    """

    def __init__(
        self, workers: Sequence[Worker], starts: Sequence[Callable[[], Coroutine[object, object, Exit]]], *, grace_s: float
    ) -> None:
        self._workers = workers
        self._starts = starts
        self._limits_s = {_Stage.SETTLING: min(SETTLE_S, grace_s), _Stage.TERMINATING: grace_s}
        self._stage = _Stage.RUNNING
        self._deadline_s: float | None = None  # of the event loop's clock, when the next stage begins by itself
        self._stopped_by: int | None = None
        self._ended: asyncio.Queue[Exit] = asyncio.Queue()
        self._exits: list[Exit] = []

    async def run(self) -> Verdict:
        """Start all, return when all have ended. Cancelling kills them. Raises OSError if one cannot be started."""
        async with asyncio.TaskGroup() as tasks:
            for start in self._starts:
                tasks.create_task(self._follow(start))
            while len(self._exits) < len(self._starts):
                await self._next_event()
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

    async def _follow(self, start: Callable[[], Coroutine[object, object, Exit]]) -> None:
        self._ended.put_nowait(await start())

    async def _next_event(self) -> None:
        """Wait for an exit, or for the moment at which this stage has lasted long enough."""
        try:
            async with asyncio.timeout_at(self._deadline_s):
                ended = await self._ended.get()
        except TimeoutError:
            self._escalate()
        else:
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
        for worker in self._workers:
            worker.signal(number)

    def _kill_all(self) -> None:
        self._enter(_Stage.KILLED)
        for worker in self._workers:
            worker.kill()

    def _enter(self, stage: _Stage) -> None:
        self._stage = stage
        limit_s = self._limits_s.get(stage)
        self._deadline_s = None if limit_s is None else asyncio.get_running_loop().time() + limit_s

    def _verdict(self) -> Verdict:
        if self._stopped_by is not None:
            return Verdict(128 + self._stopped_by)
        failure = culprit(self._exits)
        if failure is None:
            return Verdict(0)
        return Verdict(failure.status, failure, sum(end.was_ended for end in self._exits))
