"""`ProcessWorker`: a rank of a test's cluster as a process; shardnet/testing/process.py is its other end."""

import inspect
import json
import operator
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from shardnet.config import Limits, Timeouts
from shardnet.errors import UsageError
from shardnet.testing.fault import Fault
from shardnet.testing.frames import frames_of, value_of
from shardnet.testing.news import Doing, Ended, Fired, Gone, Joined, News
from shardnet.testing.nursery import Nursery
from shardnet.testing.part import Part
from shardnet.testing.rank_failure import RankFailure

MAIN = "shardnet.testing.process:main"


class ProcessWorker:
    """A process that plays its part. A thread here reads its messages from the socket; all methods are for one thread."""

    def __init__(self, number: int, part: Part, faults: Mapping[int, Fault], tell: Callable[[News], None], nursery: Nursery) -> None:
        job, frames = job_of(part, faults), frames_of(part.arguments)
        self._number = number
        self._tell = tell
        self._nursery = nursery
        self._doing: queue.SimpleQueue[Doing] = queue.SimpleQueue()
        self._output = TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `output`
        ours, theirs = socket.socketpair()
        with theirs, Path(os.devnull).open() as nothing:
            descriptors = nothing.fileno(), self._output.fileno(), self._output.fileno(), theirs.fileno()
            self.pid = nursery.fork(MAIN, descriptors=descriptors)
        self._ended = os.pidfd_open(self.pid)  # the channel does not show it: a process that the worker has started may hold it open, too
        self._channel: Connection[Any, Any] = Connection(ours.detach())
        self._say(job)
        with suppress(BrokenPipeError):
            for frame in frames:
                self._channel.send_bytes(frame)
        self._reader = threading.Thread(target=self._read, name=f"shardnet-test-worker-{number}", daemon=True)
        self._reader.start()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def doing(self, within_s: float) -> Doing:
        """What the process is doing; nothing if it does not answer."""
        self._say({"what": "doing"})
        try:
            return self._doing.get(timeout=within_s)
        except queue.Empty:
            return Doing()

    def join(self) -> int:
        """Wait until it has ended; returns its exit status, negative for a signal."""
        status = self._nursery.wait(self.pid)
        self._reader.join()
        self._channel.close()
        os.close(self._ended)
        return status

    def output(self) -> str:
        """Its whole output, when it has ended."""
        with self._output:
            self._output.seek(0)
            return self._output.read()

    def _say(self, message: Mapping[str, object]) -> None:
        with suppress(BrokenPipeError):  # it has ended, which will be noticed
            self._channel.send_bytes(json.dumps(message).encode())

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while self._channel in wait([self._channel, self._ended]):
                self._hear(json.loads(self._channel.recv_bytes()))
        self._tell(Gone(self._number))

    def _hear(self, message: dict[str, Any]) -> None:
        match message:
            case {"what": "joined", "rank": rank}:
                self._tell(Joined(self._number, rank))
            case {"what": "fired", "fault": fault}:
                self._tell(Fired(self._number, fault, lambda: self._say({"what": "done"})))
            case {"what": "doing", **facts}:
                self._doing.put(Doing(**facts))
            case {"what": "ended"}:
                self._tell(Ended(self._number, value_of(self._channel.recv_bytes(), self._channel.recv_bytes())))
            case {"what": "failed", **facts}:
                self._tell(Ended(self._number, failure=RankFailure(**facts)))


def job_of(part: Part, faults: Mapping[int, Fault]) -> dict[str, Any]:
    """What the process needs to know, as a value for JSON. Raises UsageError for a function that another process cannot find."""
    train = part.train
    name, module = getattr(train, "__qualname__", ""), inspect.getmodule(train)
    file = getattr(module, "__file__", None)
    if module is None or file is None or _named(module, name) is not train:
        raise UsageError(
            f"{train!r} cannot be found by another process; give a function that is defined at the top of a module under this name, and "
            "its arguments as args=(...), or leave out processes=True"
        )
    settings = {name: asdict(each) if isinstance(each, Timeouts | Limits) else each for name, each in part.settings.items()}
    try:
        json.dumps(settings)
    except TypeError as error:
        raise UsageError(f"a setting cannot be given to another process: {error}; give it as text or a number") from error
    return {
        "train": name,
        "module": module.__name__,
        "file": str(Path(file).resolve()),
        "every": part.every,
        "settings": settings,
        "faults": {number: asdict(fault) for number, fault in faults.items()},
        "path": sys.path,
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
    }


def _named(module: object, name: str) -> object:
    """The object that the process will find in a module under a dotted name; None if there is none."""
    with suppress(AttributeError):
        return operator.attrgetter(name)(module)
    return None
