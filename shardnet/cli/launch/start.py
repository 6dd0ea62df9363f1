"""How a worker process is started: forked from a process that has everything imported, or as a new interpreter."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from shardnet.cli.launch import forge
from shardnet.cli.launch.environment import common_environment
from shardnet.cli.launch.job import Job, StartMethod
from shardnet.cli.launch.tether import tethered
from shardnet.forking.nursery import Nursery


class Process(Protocol):
    """A process that has been started."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...

    def send_signal(self, number: int) -> None: ...


class Start(Protocol):
    """Starts workers of one program."""

    async def __call__(self, environment: Mapping[str, str], out: int, err: int, report: int) -> Process:
        """Start a new worker, in a session of its own; it does not outlive this process. `out` and `err` are its standard output and
        errors, and its report goes to `report`. Raises OSError if it cannot be started."""
        ...


@contextlib.asynccontextmanager
async def starting(job: Job) -> AsyncIterator[Start]:
    """Yields the function that starts the workers of a job; they have ended when this is left.

    Raises OSError if the process that forks them cannot be started, or ends. The main thread only: see tether.py.
    """
    if job.start_method is StartMethod.SPAWN:
        yield Spawn(job.command)
        return
    python, unbuffered, *program = job.command
    environment = common_environment(job)
    nursery = Nursery(tethered([python, unbuffered, forge.__file__, *program]), environment)
    try:
        try:
            await asyncio.to_thread(nursery.wait_until_ready)
        except OSError as error:
            raise type(error)(f"cannot start the fork server: {error}; '--start-method spawn' does without it") from error
        yield Fork(nursery, environment)
    finally:
        nursery.close()


class Spawn:
    """Starts an interpreter for each worker."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tethered(command)

    async def __call__(self, environment: Mapping[str, str], out: int, err: int, report: int) -> Process:
        return await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=(report,),
            # a pipe, not a file: nothing is left on disk however this ends
            env={**environment, "SHARDNET_REPORT_FILE": f"/dev/fd/{report}"},
            start_new_session=True,
        )


class Fork:
    """Has another process fork the workers (forge.py). It was started with `environment`; workers get additional variables."""

    def __init__(self, nursery: Nursery, environment: Mapping[str, str]) -> None:
        self._nursery = nursery
        self._environment = environment

    async def __call__(self, environment: Mapping[str, str], out: int, err: int, report: int) -> Process:
        new = [f"{name}={value}" for name, value in environment.items() if self._environment.get(name) != value]
        return ForkedProcess(self._nursery, await asyncio.to_thread(self._fork, new, out, err, report))

    def _fork(self, variables: Sequence[str], out: int, err: int, report: int) -> int:
        with Path(os.devnull).open() as nothing:
            return self._nursery.fork(*variables, descriptors=(nothing.fileno(), out, err, report))


class ForkedProcess:
    """A process that is another process's child."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._descriptor = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Its exit status, negative for a signal. Raises ConnectionError if it has ended because its parent has ended."""
        if self.returncode is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._descriptor)
            try:
                self.returncode = self._nursery.wait(self.pid)  # returns at once: it has ended
            except ConnectionError as error:  # its parent has ended, and with it all other workers, too
                self.returncode = -signal.SIGKILL
                raise type(error)(f"{error}, and all workers with it; '--start-method spawn' does without it") from error
            finally:
                os.close(self._descriptor)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)
