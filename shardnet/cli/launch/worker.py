"""`Worker`: one worker process, from its start to its last byte of output."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TextIO

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.failure import Exit
from shardnet.cli.launch.output import Output
from shardnet.cli.launch.pipe import Pipe
from shardnet.cli.launch.start import Process, Start
from shardnet.cli.launch.tracebacks import Tracebacks

STRAGGLER_S = 1.0  # without bytes, after which a pipe that outlives its worker's whole process group is given up


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker tells its launcher when it has joined, and again when it has changed."""

    address: str
    rank: int
    world_size: int

    @classmethod
    def parse(cls, line: str) -> Self | None:
        """Read "address rank world_size"; None for anything else."""
        match line.split():
            case [address, rank, world_size] if rank.isdecimal() and world_size.isdecimal():
                return cls(address, int(rank), int(world_size))
        return None


class Worker:
    """A process in a session of its own, so that a Ctrl-C in the terminal reaches it only through the launcher, and only once.

    unique_here  the local rank is unique, as on a single node; otherwise the label says "local" until the rank is known
    """

    def __init__(self, local_rank: int, console: Console, *, unique_here: bool = True) -> None:
        self.local_rank = local_rank
        self.report: Report | None = None
        self._unique_here = unique_here
        self._console = console
        self._process: Process | None = None
        self._was_ended = False
        self._early: int | None = None  # a signal that came before the process was there
        self._stdout = Output(console, console.out, self._prefix)
        self._stderr = Output(console, console.err, self._prefix, Tracebacks(console.told, lambda: self.label))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def succeeded(self) -> bool:
        return self._process is not None and self._process.returncode == 0

    @property
    def label(self) -> str:
        rank = self._rank
        return f"local rank {self.local_rank}" if rank is None else f"rank {rank}"

    async def run(self, start: Start, environment: Mapping[str, str]) -> Exit:
        """Start it, copy its output, and return when it has ended and everything that it wrote is written.

        Processes that it started in its own session are killed with it. Cancelling kills it. Raises OSError if it cannot be started.
        """
        started_s = time.monotonic()
        async with Pipe() as out, Pipe() as err, Pipe() as report:
            process = await self._begin(start, environment, out, err, report)
            async with asyncio.TaskGroup() as tasks:
                pumps = [tasks.create_task(self._stdout.pump(out)), tasks.create_task(self._stderr.pump(err))]
                listening = tasks.create_task(self._listen(report))
                try:
                    code = await process.wait()
                    ended_s = time.monotonic()
                finally:
                    self._kill_group(process.pid)
                    await process.wait()
                    listening.cancel()
                await _drain(pumps, (out, err))
        return Exit(self.label, code, started_s, ended_s, self._was_ended, self._stderr.tail)

    def signal(self, number: int) -> None:
        """Send a signal to the worker alone, which must end the processes that it started. Before its start: as soon as it has started."""
        if self._process is None:
            self._early = number  # otherwise the signal would be lost, and we might wait for the worker's end for ever
        elif self.running:
            self._was_ended = True
            self._process.send_signal(number)

    def kill(self) -> None:
        """End it and everything that it started in its session, at once."""
        if self._process is None:
            self._early = signal.SIGKILL
        elif self.running:
            self._was_ended = True
            self._kill_group(self._process.pid)

    async def _begin(self, start: Start, environment: Mapping[str, str], out: Pipe, err: Pipe, report: Pipe) -> Process:
        self._process = await start(environment, out.write_fd, err.write_fd, report.write_fd)
        for pipe in (out, err, report):
            pipe.close_writer()
        if self._early is not None:
            self.signal(self._early)
        return self._process

    async def _listen(self, pipe: Pipe) -> None:
        """Keep the newest report. Lines that are not reports are skipped: nothing can be done about them."""
        with contextlib.suppress(ValueError):  # a line that is too long
            while line := await pipe.readline():
                self.report = Report.parse(line.decode("utf-8", "replace")) or self.report

    @staticmethod
    def _kill_group(leader: int) -> None:
        """Kill a session's processes, even if the leader has been reaped: its number is not reused while one of them lives."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left; macOS says EPERM for zombies
            os.killpg(leader, signal.SIGKILL)

    @property
    def _rank(self) -> int | None:
        if self.report is not None:
            return self.report.rank
        return self.local_rank if self._unique_here else None

    def _prefix(self, stream: TextIO) -> str:
        rank = self._rank
        return self._console.prefix(f"local {self.local_rank}" if rank is None else str(rank), self.local_rank, stream)


async def _drain(pumps: Sequence[asyncio.Task[None]], pipes: Sequence[Pipe]) -> None:
    """Wait until the pumps have copied everything.

    A daemon that left the worker's session may keep a pipe open, and write to it, for ever. So a pipe is given up after too long a
    wait: bytes that the worker wrote before its end are there without waiting, however slow the console is.
    """
    before_s = [pipe.waited_s for pipe in pipes]
    while True:
        _, unfinished = await asyncio.wait(pumps, timeout=STRAGGLER_S)
        waited_s = [pipe.waited_s - before for pipe, before in zip(pipes, before_s, strict=True)]
        given_up = [pump for pump, waited in zip(pumps, waited_s, strict=True) if pump in unfinished and waited >= STRAGGLER_S]
        if len(given_up) == len(unfinished):
            break
    for pump in given_up:
        pump.cancel()
