"""`ThreadWorker`: a rank of a test's cluster as a thread of the test's own process."""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping

from shardnet.testing.fault import Action, Fault
from shardnet.testing.news import Doing, Ended, Fired, Gone, Joined, News
from shardnet.testing.part import Part
from shardnet.testing.rank_failure import RankFailure
from shardnet.testing.saboteur import Saboteur
from shardnet.training import Cluster
from shardnet.training.diagnosis import Diagnosis

GRACE_S = 10.0  # for a rank that was told to end


class ThreadWorker:
    """Plays its part on a thread and an event loop of its own, so code that blocks holds up no other rank."""

    def __init__(self, number: int, part: Part, faults: Mapping[int, Fault], tell: Callable[[News], None]) -> None:
        self._number = number
        self._part = part
        self._tell = tell
        self._saboteur = Saboteur(faults, self._act)
        self._diagnosis = Diagnosis()
        self._cluster: Cluster | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._thread = threading.Thread(target=self._run, name=f"shardnet-test-worker-{number}", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End without a goodbye; from any thread."""
        if self._cluster is not None:
            self._cluster.backend.abort()  # at once, whatever the task is in
        if self._loop is not None and self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    def thaw(self) -> None:
        raise AssertionError("a thread is not frozen")

    def doing(self, within_s: float) -> Doing:
        """What it is doing; the stacks are those of this whole process."""
        return Doing(self._diagnosis.text(), self._diagnosis.waits_for())

    def join(self) -> int:
        """Wait until it has ended. Nothing can end a thread that is stuck in its own code; it ends with the process."""
        self._thread.join(GRACE_S)
        return 0

    def output(self) -> str:
        """Nothing: it writes to the test's own output."""
        return ""

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                self._tell(Ended(self._number, runner.run(self._play())))
        except BaseException as error:  # noqa: BLE001 - the run handles it
            self._tell(Ended(self._number, failure=RankFailure.of(error)))
        self._tell(Gone(self._number))

    async def _play(self) -> object:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await self._part.play(self._saboteur, self._joined)

    def _joined(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._diagnosis.about(cluster.telemetry, lambda: cluster.topology)
        self._tell(Joined(self._number, cluster.rank))

    def _act(self, number: int, fault: Fault) -> None:
        done = threading.Event()
        self._tell(Fired(self._number, number, done.set))
        match fault.action:
            case Action.KILL:
                self.kill()
            case Action.DELAY:
                time.sleep(fault.seconds)
            case _:
                done.wait()
