"""`Line`: runs jobs of a group's collectives one after the other, on a thread of its own."""

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable

from shardnet.loop import LoopThread, help_out

Job = Callable[[], None]


class Line:
    """Collectives in the order of their sequence numbers, each with a job that may be added at any time; lives until it is closed.

    [Note: a place in the line] torch demands that all ranks launch the collectives of a process group in the same order. A collective takes
    its place at the first step of its algorithm, and the loop thread begins the collectives of a group in the order of their numbers. Its
    job runs when all collectives before it have begun their jobs, or have given up their places.
    """

    def __init__(self, name: str, at_end: Callable[[], None]) -> None:
        """`at_end` is called last, on the line's thread, if that was ever started: the first job starts it."""
        self._name = name
        self._at_end = at_end
        self._loop = LoopThread.shared()
        self._places: deque[Place] = deque()  # loop thread
        self._jobs: queue.SimpleQueue[Place | None] = queue.SimpleQueue()
        self._closed = False
        self.ended: asyncio.Future[None] | None = None  # done when the thread has ended; None: there was no thread. Loop thread

    def place(self) -> "Place":
        """Take a place after all others."""
        place = Place(self)
        self._places.append(place)
        return place

    def advance(self) -> None:
        """Begin the jobs whose turn it is."""
        while self._places and self._places[0].is_settled:
            first = self._places.popleft()
            if first.job is not None:
                self._begin(first)

    def close(self) -> None:
        """End the thread after its current job; jobs after that never end. Safe to call twice."""
        self._closed = True
        self._jobs.put(None)

    def _begin(self, place: "Place") -> None:
        place.begun = True
        self._jobs.put(place)
        if self.ended is None and not self._closed:
            self.ended = asyncio.get_running_loop().create_future()
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        help_out()
        while (place := self._jobs.get()) is not None and not self._closed:
            assert place.job is not None
            error: Exception | None = None
            try:
                place.job()
            except Exception as raised:  # noqa: BLE001 - whatever it is belongs to the collective
                error = raised.with_traceback(None)  # its frames would keep alive what `at_end` frees
            self._loop.call(place.end, error)
            del place, error
        try:
            self._at_end()
        finally:
            self._loop.call(self._end)

    def _end(self) -> None:
        assert self.ended is not None
        self.ended.set_result(None)


class Place:
    """The place of one collective in a line. Loop thread."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._given_up = False
        self.job: Job | None = None
        self.begun = False  # the job runs or will: too late to give up

    @property
    def is_settled(self) -> bool:
        return self._given_up or self.job is not None

    async def run(self, job: Job) -> None:
        """Wait for the turn and the end of a job, and raise what it raises. The job runs even if this wait is cancelled."""
        self.job = job
        self._line.advance()
        await self._ended

    def give_up(self) -> None:
        """Let later collectives pass, if the job has not begun."""
        if not self.begun:
            self.job, self._given_up = None, True
            self._line.advance()

    def end(self, error: Exception | None) -> None:
        """The job has ended; called by its line."""
        if self._ended.done():  # cancelled
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
