"""`LoopWatch`: notices event loops that one callback holds up.

The watch must not keep a loop awake: a loop that nobody wakes is a bug that tests should show, and regular pings would hide it. So the
watch looks from outside at what the loop's thread is doing, and pings only a loop that has been busy at every look for BUSY_S. A loop that
is busy with many short callbacks answers at once; a loop that is held up does not.

Time is counted in looks, not by the clock: when the whole process gets no CPU, the watch does not look either.
"""

import asyncio
import selectors
import threading
import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

import shardnet.loop
from shardnet.frames import current_frames

LOOK_EVERY_S = 0.05
BUSY_S = 0.5

# An idle asyncio loop waits in its selector. An idle uvloop shows no frame of its own, only the frame that runs it.
IDLE_FILES = (selectors.__file__, shardnet.loop.__file__)


@dataclass(slots=True)
class _Watched:
    loop: asyncio.AbstractEventLoop
    thread_id: int
    limit_s: float
    busy_looks: int = 0
    silent_looks: int = 0
    ping: threading.Event | None = None  # sent, and as far as we know not answered yet
    reported: bool = False

    def calm(self) -> None:
        self.busy_looks, self.silent_looks, self.ping, self.reported = 0, 0, None, False


class LoopWatch:
    """A thread that watches event loops; lives for one test session."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._stalls: list[str] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def add(self, loop: asyncio.AbstractEventLoop, thread_id: int, limit_s: float) -> None:
        """Watch `loop`, which runs in the thread `thread_id`, until `remove`. No callback of it may take longer than `limit_s`."""
        with self._lock:
            self._watched[id(loop)] = _Watched(loop, thread_id, limit_s)

    def remove(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            del self._watched[id(loop)]

    def take_stalls(self) -> list[str]:
        """Where loops were held up since the last call: the stack of each at the moment it was noticed."""
        with self._lock:
            stalls, self._stalls = self._stalls, []
            return stalls

    def _run(self) -> None:
        while not self._stop.wait(LOOK_EVERY_S):
            frames = current_frames()
            with self._lock:
                for watched in self._watched.values():
                    self._look(watched, frames.get(watched.thread_id))
            del frames  # they keep the locals of every thread alive

    def _look(self, watched: _Watched, frame: FrameType | None) -> None:
        if watched.ping is None:
            self._look_for_work(watched, frame)
        elif watched.ping.is_set():
            watched.calm()
        else:
            watched.silent_looks += 1
            if watched.silent_looks * LOOK_EVERY_S >= watched.limit_s and not watched.reported:
                watched.reported = True
                self._stalls.append(f"for more than {watched.limit_s} s:\n" + "".join(traceback.format_stack(frame)))

    def _look_for_work(self, watched: _Watched, frame: FrameType | None) -> None:
        if frame is None or frame.f_code.co_filename in IDLE_FILES:
            watched.busy_looks = 0
            return
        watched.busy_looks += 1
        if watched.busy_looks * LOOK_EVERY_S < BUSY_S or watched.loop.is_closed():
            return
        watched.ping = threading.Event()
        watched.loop.call_soon_threadsafe(watched.ping.set)
