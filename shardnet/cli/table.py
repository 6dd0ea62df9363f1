"""The output of `shardnet status`: a `ClusterView` as text or JSON."""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator

from shardnet.cli.grid import Row, grid
from shardnet.cli.units import short_bytes, short_duration, short_loss, short_number, short_time
from shardnet.histogram import Histogram
from shardnet.observation.views import RENDEZVOUS, ClusterView, JobView, Stats, WorkerView, late_s, short_nodes
from shardnet.waiting import Absent

_LATE = "late in all"  # a single look has only the total; `top` and the page show the last seconds
_WORKER_HEAD = (
    "rank",
    "node",
    "address",
    "state",
    "step",
    "step time",
    "loss",
    "tokens/s",
    "wait",
    _LATE,
    "sent",
    "received",
    "memory",
    "shared with",
    "collectives",
)
_OP_HEAD = ("collective", "count", "failed", "sent", "mean time", "half", "99 %", "waited")
_WORDS = frozenset({"node", "address", "state", "shared with", "collective"})  # columns that are not numbers
_NONE = "-"
_SHOWN_LATE_S = 0.05  # less rounds to nothing
_COPIED = "*"
_COPIED_WORDS = f"{_COPIED} large data is copied through memory: this system does not let processes read each other's memory"


def as_text(view: ClusterView) -> str:
    stats = view.stats
    head = f"{stats.role} {view.address}: {view.health}, {stats.connections}, up {short_duration(stats.uptime_s)}, shardnet {stats.version}"
    head += f", metrics at {stats.metrics}" if stats.metrics else ""
    if view.stats.role == RENDEZVOUS:
        jobs = [_job(job) for job in view.jobs] or ["no jobs"]
        return "\n\n".join([head, *jobs])
    itself = WorkerView(view.stats.rank, "", view.address, view.health, view.stats)
    place = f"rank {view.stats.rank} of {view.stats.world_size}, epoch {view.stats.epoch}"
    head = f"{head}, {place}{_routing([itself])}"
    return "\n\n".join([head, _workers([itself]), _collectives(stats), "\n".join([*_notes(stats), *_latecomers(stats)])]).rstrip()


def as_json(view: ClusterView) -> str:
    """The fields of `ClusterView`; unknown numbers are null."""
    return json.dumps(_without_nan(dataclasses.asdict(view)), indent=2, allow_nan=False)


def _job(job: JobView) -> str:
    notes = [f", {job.waiting} waiting to join"] if job.waiting else []
    notes += [f", {job.absent} without a connection to the rendezvous"] if job.absent else []
    head = f"job {job.job}: {job.state}, epoch {job.epoch}, {job.headcount}{''.join(notes)}{_routing(job.workers)}"
    parts = [head, *([job.first_lost] if job.first_lost else []), *([_workers(job.workers)] if job.workers else [])]
    return "\n".join(parts)


def _workers(workers: Iterable[WorkerView]) -> str:
    workers = list(workers)
    nodes = short_nodes([worker.node for worker in workers])
    text = grid(_WORKER_HEAD, [_worker(worker, node, _late(worker, workers)) for worker, node in zip(workers, nodes, strict=True)], _WORDS)
    return "\n".join([f"{text}\n{_COPIED_WORDS}" if _COPIED in text else text, *_stuck(workers), *_stale(workers)])


def _stuck(workers: Iterable[WorkerView]) -> list[str]:
    """What ranks wait for; all ranks that say the same are in one line."""
    waiting: dict[tuple[str, tuple[Absent, ...]], list[tuple[int, float]]] = {}
    for worker in workers:
        for each in worker.stats.waiting if worker.stats is not None else ():
            waiting.setdefault((each.collective, each.absent), []).append((worker.rank, each.seconds))
    lines = []
    for (collective, absent), who in waiting.items():
        ranks = ", ".join(str(rank) for rank, _ in who)
        verb = f"ranks {ranks} wait" if len(who) > 1 else f"rank {ranks} waits"
        lines.append(f"{verb} {max(seconds for _, seconds in who):.1f} s in {collective} for {'; '.join(map(str, absent))}")
    return lines


def _stale(workers: Iterable[WorkerView]) -> list[str]:
    """Workers that have dropped data because it came too late, or was not for them. Some is usual after each failed collective; much of it,
    again and again, means that something repeats old messages."""
    return [
        f"rank {worker.rank} has dropped {worker.stats.stale_chunks} chunks of collectives or epochs that were over"
        for worker in workers
        if worker.stats is not None and worker.stats.stale_chunks
    ]


def _routing(workers: Iterable[WorkerView]) -> str:
    """Which way collectives go, from the first worker that knows it; it is the same for all."""
    routing = next((worker.stats.routing for worker in workers if worker.stats is not None and worker.stats.routing), "")
    return f"\ncollectives: {routing}" if routing else ""


def _late(worker: WorkerView, workers: Iterable[WorkerView]) -> str:
    waited_s = late_s(worker, workers)
    return _NONE if waited_s is None else f"{waited_s:.1f} s"


def _worker(worker: WorkerView, node: str, late: str) -> Row:
    place = (str(worker.rank), node or _NONE, worker.address, worker.state)
    stats = worker.stats
    if stats is None:
        head = (*place, *[_NONE] * (_WORKER_HEAD.index(_LATE) - len(place)), late)
        return (*head, *[_NONE] * (len(_WORKER_HEAD) - len(head)))
    progress = stats.progress
    return (
        *place,
        f"{stats.step}/{progress.total_steps}" if progress.total_steps else str(stats.step),
        short_time(stats.steps.seconds / stats.steps.times.count) if stats.steps.times.count else _NONE,
        _NONE if math.isnan(progress.loss) else short_loss(progress.loss),
        short_number(progress.tokens_per_s) if progress.tokens_per_s else _NONE,
        _NONE if stats.wait_share is None else f"{stats.wait_share:.0%}",
        late,
        short_bytes(stats.bytes_sent),
        short_bytes(stats.bytes_received),
        short_bytes(stats.resident_bytes),
        ",".join(f"{peer}" if peer in stats.borrowers else f"{peer}{_COPIED}" for peer in stats.memory_peers) or _NONE,
        str(sum(op.count for op in stats.collectives.values())),
    )


def _collectives(stats: Stats) -> str:
    if not stats.collectives:
        return "no collectives yet"
    rows = [
        (
            *(name, str(op.count), str(op.failed), short_bytes(op.bytes), _mean_ms(op.seconds, op.count)),
            *(_time(op.latency, 0.5), _time(op.latency, 0.99), _mean_ms(op.waited_s, op.count)),
        )
        for name, op in sorted(stats.collectives.items())
    ]
    return grid(_OP_HEAD, rows, _WORDS)


def _notes(stats: Stats) -> Iterator[str]:
    """What one worker reports besides its row, one line each; nothing about events that did not happen."""
    steps = stats.steps
    if steps.times.count:
        times = f"half within {_time(steps.times, 0.5)}, 99 % within {_time(steps.times, 0.99)}"
        waiting = "" if stats.wait_share is None else f", {stats.wait_share:.0%} of it waiting for communication"
        yield f"{steps.times.count} steps, {times}{waiting}"
    if stats.epochs > 1 or stats.losses:
        yield f"member of {stats.epochs} epochs, has lost {stats.losses} peers"
    if stats.stalls:
        yield f"{stats.stalls} collectives were stuck, for {stats.stall_s:.1f} s in all"
    if stats.link_bytes_per_s:
        yield f"{short_bytes(stats.link_bytes_per_s)}/s to the next rank when the training began"
    if stats.peak_resident_bytes:
        devices = f"; on devices {short_bytes(stats.device_bytes)}, at most {short_bytes(stats.device_peak_bytes)}"
        memory = f"memory {short_bytes(stats.resident_bytes)}, {short_bytes(stats.shared_bytes)} of it shared"
        yield f"{memory}, at most {short_bytes(stats.peak_resident_bytes)}{devices if stats.device_peak_bytes else ''}"


def _latecomers(stats: Stats) -> list[str]:
    """The ranks for which this worker has waited, the latest first: a worker alone does not know how long the others waited for it."""
    found = sorted(stats.late.items(), key=lambda each: each[1], reverse=True)
    words = [f"{seconds:.1f} s for rank {rank}" for rank, seconds in found if seconds >= _SHOWN_LATE_S]
    return [f"has waited {', '.join(words)}"] if words else []


def _time(times: Histogram, share: float) -> str:
    """The time within which this share of them ended; from buckets, so rounded up to half an order of magnitude."""
    return short_time(times.quantile(share)) if times.count else _NONE


def _mean_ms(seconds: float, count: int) -> str:
    return f"{1e3 * seconds / max(count, 1):.2f} ms"


def _without_nan(value: object) -> object:
    match value:
        case float() if math.isnan(value) or math.isinf(value):
            return None
        case dict():
            return {key: _without_nan(item) for key, item in value.items()}
        case list() | tuple():
            return [_without_nan(item) for item in value]
        case _:
            return value
