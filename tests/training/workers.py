"""`Worker`: the test's end of a worker process (tests/training/worker.py); and a rendezvous for workers."""

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

import pytest

from shardnet.config import Timeouts
from shardnet.loop import LoopThread
from shardnet.rendezvous.server import RendezvousServer
from shardnet.testing import nursery as forks

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 45.0  # far longer than anything here takes; only a hang reaches it

Message = dict[str, Any]


class Nursery(forks.Nursery):
    """The process that forks the workers of all tests."""

    def __init__(self) -> None:
        super().__init__("tests.training.worker", cwd=ROOT)

    def work(self, rendezvous: str, stdin: int, stdout: int, namespace: str = "") -> int:
        """The pid of a new worker, in a network namespace if one is named."""
        return self.fork("tests.training.worker:work", rendezvous, namespace, descriptors=(stdin, stdout))

    def call(self, function: str, *arguments: str, within_s: float) -> str:
        """Run "module:name" in a process of its own, to its end, and return its output. It returns the exit status, which must be 0."""
        with Path(os.devnull).open() as nothing, TemporaryFile("w+") as output:
            pid = self.fork(function, *arguments, descriptors=(nothing.fileno(), output.fileno(), output.fileno()))
            status = self.wait_or_kill(pid, within_s)
            output.seek(0)
            printed = output.read()
        assert status == 0, f"{function} ended with {status}:\n{printed}"
        return printed

    def reference(self, function: str, folders: Callable[[], Path], *arguments: str, within_s: float) -> Path:
        """The folder, one of these, with the results of a run of torch's own engine.

        Now and then, on a busy machine, a process of such a run is ended by torch (`terminate called after throwing an instance of
        'c10::Error'`, on gloo's threads, where nobody can catch anything). That is not under test, so it gets another try.
        """
        for is_last in (False, False, True):
            folder = folders()
            try:
                self.call(function, str(folder), *arguments, within_s=within_s)
            except AssertionError as error:
                if is_last or "terminate called" not in str(error):
                    raise
            else:
                break
        return folder


class Worker:
    """A running worker process; killed if a test leaves before it has ended."""

    def __init__(self, nursery: Nursery, rendezvous: str, namespace: str = "") -> None:
        self.rank = -1
        self.address = ""
        self._nursery = nursery
        self._seen = b""
        stdin, self._stdin = os.pipe()
        self._stdout, stdout = os.pipe()
        self._status: int | None = None
        try:
            self.pid = nursery.work(rendezvous, stdin, stdout, namespace)
        finally:
            os.close(stdin)
            os.close(stdout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self._nursery.wait(self.pid)
            os.close(self._stdin)
        os.close(self._stdout)

    def tell(self, **command: object) -> None:
        """Give it a job. While it streams, any message makes all workers stop."""
        os.write(self._stdin, json.dumps(command).encode() + b"\n")

    def hear(self, what: str, *, skip: str = "", within_s: float = PATIENCE_S) -> Message:
        """Its next message that is not of the kind `skip`; it must be of this one."""
        deadline = time.monotonic() + within_s
        while (message := self._next(deadline, what))["what"] == skip:
            pass  # the time is that for all of them
        assert message["what"] == what, message
        if what == "joined":
            self.rank, self.address = message["rank"], message["address"]
        return message

    def hear_any(self, within_s: float = PATIENCE_S) -> Message:
        """Its next message."""
        return self._next(time.monotonic() + within_s, "anything")

    def listen(self, until_s: float = 0.0) -> None:
        """Take in what it says until that time, at least what it has said, for later: it would wait if its pipe were full."""
        while select.select([self._stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
            self._read(until_s, "anything")

    def signal(self, number: signal.Signals) -> float:
        """Send it a signal; time.monotonic() of the moment before."""
        now_s = time.monotonic()
        os.kill(self.pid, number)
        return now_s

    def end(self) -> int:
        """Close its input, which ends it, if it has not ended yet; its exit status."""
        if self._status is None:
            os.close(self._stdin)
            self._status = self._nursery.wait(self.pid)
        return self._status

    def ended(self) -> int:
        """Wait until it has ended by itself; its exit status."""
        if self._status is None:
            self._status = self._nursery.wait(self.pid)
            os.close(self._stdin)
        return self._status

    def _next(self, deadline: float, what: str) -> Message:
        while b"\n" not in self._seen:
            self._read(deadline, what)
        line, self._seen = self._seen.split(b"\n", 1)
        message: Message = json.loads(line)
        return message

    def _read(self, deadline: float, what: str) -> None:
        ready, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"rank {self.rank} did not say {what!r} in time"
        data = os.read(self._stdout, 65536)
        assert data, f"rank {self.rank} ended and did not say {what!r}"
        self._seen += data


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where the workers of all tests come from."""
    nursery = Nursery()
    yield nursery
    nursery.close()


@contextmanager
def rendezvous() -> Iterator[str]:
    """The address of a rendezvous that runs on this process's loop thread."""
    loop = LoopThread.shared()
    server = RendezvousServer("127.0.0.1:0", timeouts=Timeouts.for_tests())
    loop.run(server.start()).result()
    try:
        yield server.address
    finally:
        loop.run(server.aclose()).result()


@contextmanager
def streaming(nursery: Nursery, world_size: int, **command: Any) -> Iterator[list[Worker]]:
    """Workers, by rank, in the middle of a stream of collectives."""
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(world_size)]
        begin(workers, work="stream", **command)
        for worker in workers:
            worker.hear("streaming")
        yield sorted(workers, key=lambda worker: worker.rank)


def begin(workers: list[Worker], nodes: Sequence[str] = (), job: str = "test", **command: Any) -> None:
    """Let them join a job together; without `nodes`, what each one's is called, they are on one."""
    for worker, node in zip(workers, nodes or [""] * len(workers), strict=True):
        worker.tell(job=job, world_size=len(workers), node=node, **command)
    for worker in workers:
        worker.hear("joined")
