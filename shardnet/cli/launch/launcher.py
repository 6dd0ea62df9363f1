"""`launch`: a whole run on this machine, from the rendezvous to the exit status."""

import asyncio
import contextlib
import functools
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.failure import describe, describe_losses
from shardnet.cli.launch.job import Job
from shardnet.cli.launch.place import Place
from shardnet.cli.launch.progress import Ask, ProgressView, follow
from shardnet.cli.launch.recovery import Recovery
from shardnet.cli.launch.start import Start, starting
from shardnet.cli.launch.supervisor import Supervisor, Verdict
from shardnet.cli.launch.worker import Worker

BROKEN_PIPE_STATUS = 128 + signal.SIGPIPE
CLOCK_S = 2.0  # a file system may round times to as many seconds, and a file server's clock may be as late
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Rendezvous(Protocol):
    """The rendezvous at which workers meet."""

    @property
    def address(self) -> str: ...


OpenRendezvous = Callable[[], AbstractAsyncContextManager[Rendezvous]]


async def launch(job: Job, console: Console, open_rendezvous: OpenRendezvous, ask: Ask) -> int:
    """Run the job's workers on this machine; return the exit status for the process.

    open_rendezvous  makes the rendezvous to use if the job names none; open as long as the workers run
    ask              how to learn a worker's progress

    The status is that of the worker whose failure ended the run, 128 + n if it died of signal n or the user sent n, 141 if
    nobody reads the output any more, and 0 if all is well. Cancelling kills the workers. Raises RendezvousError or OSError
    if the rendezvous or a worker cannot be started, or if the process that forks them is lost.
    """
    try:
        async with _meeting_point(job, open_rendezvous) as address, starting(job) as start:
            verdict = await _supervise(job, console, address, start, ask)
    except BaseExceptionGroup as group:
        if group.subgroup(BrokenPipeError) is not None:
            return BROKEN_PIPE_STATUS
        raise _first_leaf(group) from group
    console.remove_bar()
    if verdict.failure is not None:
        least = job.least_workers if verdict.too_few else None
        console.say(describe(verdict.failure, verdict.ended_with_it, least, stands_above=console.ends_with(verdict.failure.last_words)))
    elif verdict.lost or verdict.replaced:
        console.say(describe_losses(verdict.lost, verdict.replaced))
    return verdict.status


@contextlib.asynccontextmanager
async def _meeting_point(job: Job, open_rendezvous: OpenRendezvous) -> AsyncIterator[str]:
    if job.rendezvous is not None:
        yield job.rendezvous
        return
    async with open_rendezvous() as rendezvous:
        yield rendezvous.address


async def _supervise(job: Job, console: Console, rendezvous: str, start: Start, ask: Ask) -> Verdict:
    places = [Place(local_rank, job, rendezvous, start, console) for local_rank in range(job.nproc)]
    supervisor = Supervisor(places, grace_s=job.grace_s, say=console.say, recovery=_recovery(job, console))
    begin_s = time.time()
    with _stop_signals(supervisor, console):
        async with asyncio.TaskGroup() as tasks:
            progress = tasks.create_task(follow(functools.partial(_by_rank, places), ask, ProgressView(console)))
            verdict = await supervisor.run()
            progress.cancel()
    has_trace = job.trace is not None and verdict.status == 0 and any(_ended_as_rank_0(place.worker) for place in places)
    if has_trace and await asyncio.to_thread(_is_written, Path(str(job.trace)), begin_s):  # otherwise rank 0 has said why not
        console.say(f"timeline of all ranks, for https://ui.perfetto.dev: {job.trace}")
    return verdict


def _is_written(path: Path, since_s: float) -> bool:
    try:
        return path.stat().st_mtime >= since_s - CLOCK_S
    except OSError:
        return False


def _recovery(job: Job, console: Console) -> Recovery | None:
    return Recovery(job.restarts or 0, job.least_workers_here, console.say) if job.elastic else None


@contextlib.contextmanager
def _stop_signals(supervisor: Supervisor, console: Console) -> Iterator[None]:
    """Pass the user's signals to the supervisor while the workers run. A signal that is ignored, for example by nohup, stays ignored."""

    def stop(number: int) -> None:
        name = signal.Signals(number).name
        if supervisor.stopping:
            console.say(f"{name}: killing the workers")
        else:
            console.say(f"{name}: passed on to the workers; a second one kills them")
        supervisor.stop(number)

    loop = asyncio.get_running_loop()
    numbers = [number for number in _STOP_SIGNALS if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]
    for number in numbers:
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _by_rank(places: Sequence[Place]) -> list[str]:
    """The addresses of the workers that have joined and run, the one whose progress is shown first: the lowest rank."""
    reports = [place.worker.report for place in places if place.worker.report is not None and place.worker.running]
    return [report.address for report in sorted(reports, key=lambda report: report.rank)]


def _ended_as_rank_0(worker: Worker) -> bool:
    return worker.succeeded and worker.report is not None and worker.report.rank == 0


def _first_leaf(error: BaseException) -> BaseException:
    """The error itself, without the task groups around it: the first worker's error is enough."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
