"""Draws a view of the cluster as text."""

import math
import time
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardnet.cli.units import short_bytes, short_duration, short_loss, short_number, short_time
from shardnet.observation.chronicle import Event
from shardnet.observation.rates import LATE_SHARE, RateMeter, Rates
from shardnet.observation.views import GONE, RENDEZVOUS, ClusterView, JobView, WorkerView, short_nodes

_COLUMNS = ("rank", "node", "state", "step", "a step", "wait", "late", "sent/s", "received/s", "memory")
_WORDS = ("node", "state")  # columns that are not numbers
_NONE = "-"
_BAR = 30  # characters
_WAITS_MUCH = 0.3  # the share of the step from which waiting counts as much


def draw(view: ClusterView, meter: RateMeter, events: Sequence[Event]) -> RenderableType:
    """Draw the whole view, however much room there is."""
    stats = view.stats
    head = Text.assemble(
        (f"{stats.role} {view.address}", "bold"),
        ": ",
        (view.health, _colour(view.health)),
        f", {stats.connections}, up {short_duration(stats.uptime_s)}, shardnet {stats.version}",
    )
    if stats.role == RENDEZVOUS:
        jobs: list[RenderableType] = [_job(job, meter) for job in view.jobs] or [Text("no jobs yet", "dim")]
    else:
        jobs = [_workers([WorkerView(stats.rank, "", view.address, view.health, stats)], meter)]
    return Group(head, *jobs, *_events(events))


def _job(job: JobView, meter: RateMeter) -> RenderableType:
    here = [worker for worker in job.workers if worker.state != GONE]
    head = Text.assemble("\n", (f"job {job.job}", "bold"), f": {job.state}, epoch {job.epoch}, {job.headcount}")
    if job.waiting:
        head.append(f", {job.waiting} waiting to join", "yellow")
    parts: list[RenderableType] = [head]
    leader = next((worker for worker in here if worker.stats is not None and worker.stats.progress.step), None)
    if leader is not None:
        parts.append(_progress(leader, meter.of(leader)))
    return Group(*parts, _workers(job.workers, meter)) if job.workers else Group(*parts)


def _progress(worker: WorkerView, rates: Rates) -> RenderableType:
    assert worker.stats is not None
    progress = worker.stats.progress
    words = [f"step {progress.step}{f' of {progress.total_steps}' if progress.total_steps else ''}"]
    words += [] if math.isnan(progress.loss) else [f"loss {short_loss(progress.loss)}"]
    words += [f"{short_number(progress.tokens_per_s)} tokens/s"] if progress.tokens_per_s else []
    if progress.total_steps and rates.step_s:
        words.append(f"{short_duration(rates.step_s * max(0, progress.total_steps - progress.step))} left")
    words += [progress.note] if progress.note else []
    line = Table.grid(padding=(0, 1))
    bar = [ProgressBar(progress.total_steps, progress.step, width=_BAR)] if progress.total_steps else []
    line.add_row(*bar, Text(", ".join(words)))
    return line


def _workers(workers: Iterable[WorkerView], meter: RateMeter) -> RenderableType:
    workers = list(workers)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _WORDS else "right", no_wrap=True)
    for worker, node, late in zip(workers, short_nodes([worker.node for worker in workers]), meter.late(workers), strict=True):
        table.add_row(*_worker(worker, node, meter.of(worker), late))
    return table


def _worker(worker: WorkerView, node: str, rates: Rates, awaited: float | None) -> list[Text]:
    """`awaited`: the share of the time for which others have waited for this worker."""
    late = Text(_NONE if awaited is None else f"{awaited:.0%}", "yellow" if (awaited or 0.0) > LATE_SHARE else "")
    place = [Text(str(worker.rank)), Text(node or _NONE), Text(worker.state, _colour(worker.state))]
    stats = worker.stats
    if stats is None:
        return [*place, *[Text(_NONE)] * 3, late, *[Text(_NONE)] * 3]
    return [
        *place,
        Text(str(stats.step)),
        Text(_NONE if rates.step_s is None else short_time(rates.step_s)),
        Text(_NONE if rates.wait is None else f"{rates.wait:.0%}", "yellow" if (rates.wait or 0.0) > _WAITS_MUCH else ""),
        late,
        Text(_NONE if rates.sent is None else short_bytes(rates.sent)),
        Text(_NONE if rates.received is None else short_bytes(rates.received)),
        Text(short_bytes(stats.resident_bytes)),
    ]


def _events(events: Sequence[Event]) -> list[RenderableType]:
    if not events:
        return []
    lines = [
        Text.assemble((time.strftime("%H:%M:%S", time.localtime(event.at_s)), "dim"), "  ", (event.what, "red" if event.bad else ""))
        for event in events
    ]
    return [Text("\nevents", "bold"), *lines]


def _colour(state: str) -> str:
    return "green" if state == "serving" else "red"
