"""`Story`: what the nodes of a cluster say, and when the engine heard it."""

import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from compose_test.console import Failure

T = TypeVar("T")
_STEP = re.compile(r"\] step (\d+) of \d+: validation loss ")
_WORLD = re.compile(r"million parameters over (\d+) ranks?, ")
_EPOCH = re.compile(r"epoch (\d+) with (\d+) workers?: it goes on behind step (\d+), ([\d.]+) s after: (.*)")


@dataclass(frozen=True)
class Line:
    """One line of a container.

    at_s  by the engine's clock, in seconds since 1970
    """

    at_s: float
    container: str
    text: str


@dataclass(frozen=True)
class Epoch:
    """The training goes on with other workers.

    workers  how many there are now
    step     the training goes on after this one
    ended_s  when the rank that reports it learnt that the epoch before was over
    at_s     when that rank had brought everyone to that step
    """

    workers: int
    step: int
    ended_s: float
    at_s: float
    why: str


def read_line(container: str, raw: str) -> Line | None:
    """Parse a line of `docker logs --timestamps`; None if it is not one."""
    stamp, _, text = raw.partition(" ")
    whole, _, fraction = stamp.rstrip("Z\n").partition(".")
    try:
        at_s = datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
    except ValueError:
        return None
    return Line(at_s, container, text.rstrip())


def step_of(line: Line) -> int | None:
    """The step that rank 0 has committed."""
    found = _STEP.search(line.text)
    return None if found is None else int(found[1])


def world_of(line: Line) -> int | None:
    """How many ranks train from this line on."""
    found = _WORLD.search(line.text)
    return None if found is None else int(found[1])


def epoch_of(line: Line) -> Epoch | None:
    found = _EPOCH.search(line.text)
    if found is None:
        return None
    return Epoch(int(found[2]), int(found[3]), line.at_s - float(found[4]), line.at_s, found[5])


class Story:
    """Listens to containers for as long as they run, each with its own thread and `docker logs`, until `close`."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        self._heard = set[Line]()
        self._news = threading.Condition()
        self._listeners: dict[str, tuple[subprocess.Popen[str], threading.Thread]] = {}

    def listen(self, container: str) -> None:
        """Listen to a container that has just been started, for the first time or again. Do nothing if this already listens to it."""
        known = self._listeners.get(container)
        if known is not None and known[1].is_alive():
            return
        command = ("docker", "logs", "--follow", "--timestamps", container)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        thread = threading.Thread(target=self._read, args=(container, process), name=f"listens to {container[:12]}")
        self._listeners[container] = process, thread
        thread.start()

    def close(self) -> None:
        for process, thread in self._listeners.values():
            process.terminate()
            thread.join()

    def find(self, read: Callable[[Line], T | None], *, since_s: float = 0.0, until_s: float = float("inf")) -> list[T]:
        """What `read` makes of the lines from `since_s` to `until_s`, the earliest first."""
        with self._news:
            lines = sorted((line for line in self._lines if since_s < line.at_s <= until_s), key=lambda line: line.at_s)
        return [found for line in lines if (found := read(line)) is not None]

    def wait(
        self, read: Callable[[Line], T | None], *, since_s: float, timeout_s: float, what: str, alive: Callable[[], bool] = lambda: True
    ) -> T:
        """The first result of `read` for a line after `since_s`. Raises Failure, naming `what`, if none comes in time or nobody is
        `alive` any more to print it."""
        deadline_s = time.monotonic() + timeout_s
        with self._news:
            while not (found := self.find(read, since_s=since_s)):
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise Failure(f"{what}: not within {timeout_s:g} s")
                if not alive():
                    raise Failure(f"{what}: the training has ended before")
                self._news.wait(min(left_s, 1.0))
        return found[0]

    def tail(self, count: int) -> list[str]:
        return [f"{line.container[:12]} {line.text}" for line in self.find(lambda line: line)[-count:]]

    def _read(self, container: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for raw in lines:
                line = read_line(container, raw)
                if line is None:
                    continue
                with self._news:
                    # A restarted container's log begins with its old lines again. Timestamps cannot tell: when a program writes to both of
                    # its outputs at once, the later line may come first.
                    if line not in self._heard:
                        self._heard.add(line)
                        self._lines.append(line)
                        self._news.notify_all()
        process.wait()
