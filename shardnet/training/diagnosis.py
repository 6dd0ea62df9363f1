"""`Diagnosis`: what a process is doing at this moment, in words."""

import asyncio
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from shardnet.flight import Flight
from shardnet.frames import current_frames
from shardnet.loop import LoopThread
from shardnet.telemetry import Telemetry
from shardnet.topology import Topology

_FLIGHTS = 20
_FRAMES = 40  # of a stack, the innermost ones


class Diagnosis:
    """The diagnosis of one membership. It only reads, so any thread may ask for it, whatever the others are stuck in; the other
    threads may go on meanwhile."""

    def __init__(self) -> None:
        self._telemetry = Telemetry()
        self._topology: Callable[[], Topology] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the program

    def about(self, telemetry: Telemetry, topology: Callable[[], Topology]) -> None:
        """Called when the world is formed, on the program's event loop, whose tasks are then listed, too."""
        self._telemetry, self._topology, self._loop = telemetry, topology, asyncio.get_running_loop()

    def waits_for(self) -> list[int]:
        """The ranks that have not entered a collective in which this one has been waiting for long."""
        return sorted({absent.rank for each in self._telemetry.waiting if not each.is_over for absent in each.absent})

    def text(self, found: str = "") -> str:
        """The diagnosis. `found` is the stack of the thread that got the signal, as it was then."""
        parts = {
            "collectives under way": self._under_way(),
            f"the last {_FLIGHTS} collectives": map(self._flight, self._telemetry.flights.last(_FLIGHTS)),
            "tasks of the program's loop": _tasks(self._loop) if self._loop is not None else (),
            "tasks of shardnet's loop": _tasks(LoopThread.shared().loop),
            "threads": _threads(),
            "stack of the thread that got the signal": found.splitlines(),
        }
        lines = [f"{self._where()} process {os.getpid()} reports what it is doing (SIGUSR1)"]
        for title, content in parts.items():
            lines += [f"{title}:", *(f"  {line}" for line in content)]
        return "\n".join([*lines, f"end of the report of process {os.getpid()}", ""])

    def _where(self) -> str:
        if self._topology is None:
            return "[no rank yet]"
        topology = self._topology()
        return f"[rank {topology.rank}/{topology.world_size} epoch {topology.epoch} step {self._telemetry.step}]"

    def _under_way(self) -> Iterator[str]:
        waiting = {each.flight: each for each in self._telemetry.waiting}
        for flight in self._telemetry.flights.last():
            if not flight.ended_ns:
                yield str(waiting[flight]) if flight in waiting else f"{flight.full_name}: {flight.state}, {_ago(flight.begun_ns)}"

    def _flight(self, flight: Flight) -> str:
        took = f", took {(flight.ended_ns - flight.begun_ns) / 1e6:.1f} ms" if flight.ended_ns else ""
        how = f"{flight.state}{took}" + (f" with {flight.error}" if flight.error else "")
        return f"{_ago(flight.begun_ns)}: {flight.full_name}, step {flight.step}, sent {flight.bytes_sent} bytes: {how}"


def _ago(counter_ns: int) -> str:
    return f"{(time.perf_counter_ns() - counter_ns) / 1e9:.3f} s ago"


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """Each task with the places where its coroutines stand, outermost first; tasks that stand at the same places share a line."""
    names: dict[str, list[str]] = {}
    for task in asyncio.all_tasks(loop):
        names.setdefault(" > ".join(_places(task.get_coro())), []).append(task.get_name())
    for places, tasks in sorted(names.items()):
        yield f"{', '.join(sorted(tasks))}: {places}"


def _places(awaited: object) -> Iterator[str]:
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            line = "" if frame.f_lineno is None else f":{frame.f_lineno}"  # gRPC's coroutines are compiled
            yield f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}{line})"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None) or getattr(awaited, "ag_await", None)


def _threads() -> Iterator[str]:
    frames = current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in frames.items():
        if ident != threading.get_ident():
            yield f"{names.get(ident, 'not known to Python')} ({ident}):"
            for entry in traceback.format_stack(frame)[-_FRAMES:]:
                yield from (f"  {line}" for line in entry.rstrip().splitlines())
