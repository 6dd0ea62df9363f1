"""`answer`: the data for the page, as a value for JSON.

[Note: what the page is told] The fields, and the fields of nested values:

version     1; increased if a field changes its meaning
run         identifies the process that answers; number, at_s: its last look
since       null: points and events are all that exist; otherwise those after that look
rendezvous  the process itself; null before the first look
jobs        all jobs in short form
job         one of them, the requested one if it exists; null: there is none
  progress  what its first worker reports
  workers   rank, node (an index of nodes), address, state; step_s, wait (share of the step), late_share (of the last seconds
            others have waited for it), late (it holds the others up), sent, received; to: [rank, network, memory]
  recent    what each worker, by address, has sent at the last looks; null with `since`
  points    rows of `columns`
events      [number, at_s, what, bad]

Unknown values are null. Bytes are payload, times are in seconds, rates per second.
"""

import math
from dataclasses import fields
from typing import Any

from shardnet.observation.chronicle import Event
from shardnet.observation.rates import LATE_SHARE
from shardnet.observation.views import GONE, OVER, ClusterView, JobView, Stats, WorkerView, short_nodes
from shardnet.web.history import History, Point, traffic
from shardnet.web.story import Story

VERSION = 1
_LATER = 2.5  # times as late as the others
_COLUMNS = [each.name for each in fields(Point)]


def answer(story: Story, job: str = "", since: int | None = None) -> dict[str, Any]:
    """`job` is the requested job, empty: any; `since` is the look up to which the caller knows the story of that job."""
    view = story.view
    told: dict[str, Any] = {"version": VERSION, "run": story.run, "number": story.number, "at_s": round(story.at_s, 2), "since": since}
    if view is None:
        return {**told, "rendezvous": None, "jobs": [], "job": None, "events": []}
    chosen = _choose(view, job)
    if chosen is None or chosen.job != job or (since or 0) > story.number:
        told["since"] = since = None  # the caller knows the points of another job
    return {
        **told,
        "rendezvous": _rendezvous(view),
        "jobs": [{"name": each.job, "state": each.state, "epoch": each.epoch, "workers": len(_here(each))} for each in view.jobs],
        "job": None if chosen is None else _job(story, chosen, since),
        "events": [_event(number, event) for number, event in story.events(since or 0)],
    }


def _choose(view: ClusterView, name: str) -> JobView | None:
    """The requested job, otherwise the newest that runs, or forms, or has ended, in this order."""
    asked = next((job for job in view.jobs if job.job == name), None)
    order = (*OVER, "forming", "running")
    return asked or max(reversed(view.jobs), key=lambda job: order.index(job.state) if job.state in order else 0, default=None)


def _rendezvous(view: ClusterView) -> dict[str, Any]:
    stats = view.stats
    return {
        "address": view.address,
        "health": view.health,
        "version": stats.version,
        "connections": stats.connections,
        "uptime_s": round(stats.uptime_s),
    }


def _job(story: Story, job: JobView, since: int | None) -> dict[str, Any]:
    history = story.histories.get(job.job, History())
    nodes = list(dict.fromkeys(_node(worker, job) for worker in job.workers))
    network, memory = traffic(_here(job), story.meter)
    return {
        "name": job.job,
        "state": job.state,
        "epoch": job.epoch,
        "joined": job.joined,
        "absent": job.absent,
        "wanted": [job.min_world_size, job.max_world_size],
        "routing": next((worker.stats.routing for worker in job.workers if worker.stats is not None and worker.stats.routing), ""),
        "progress": _progress(story, job, history),
        "network": _short(network),
        "memory": _short(memory),
        "nodes": short_nodes(nodes),
        "workers": _mark_late([_worker(story, job, worker, nodes) for worker in job.workers], job, story),
        "recent": {worker.address: [_short(value) for value in history.sent(worker)] for worker in job.workers} if since is None else None,
        "columns": _COLUMNS,
        "points": [_point(point) for point in history.since(since or 0)],
    }


def _progress(story: Story, job: JobView, history: History) -> dict[str, Any] | None:
    """None if no worker reports any. For a job that is over, the last known progress."""
    stats = next((worker.stats for worker in _here(job) if worker.stats is not None), None)
    if stats is None:
        said = next((point for point in reversed(history.points) if point.step is not None), None)
        return None if said is None else {"step": said.step, "total_steps": None, "loss": _short(said.loss), "note": ""}
    last = history.points[-1] if history.points else None
    progress = stats.progress
    total = progress.total_steps or None
    is_moving = last is not None and last.step_s is not None
    return {
        "step": stats.step,
        "total_steps": total,
        "loss": _short(progress.loss),
        "tokens_per_s": _short(last.tokens_per_s if last else None),
        "step_s": _short(last.step_s if last else None),
        "left_s": _short((last.step_s or 0.0) * max(0, total - stats.step)) if total and last and is_moving else None,
        "note": progress.note,
    }


def _worker(story: Story, job: JobView, worker: WorkerView, nodes: list[str]) -> dict[str, Any]:
    place: dict[str, Any] = {"rank": worker.rank, "node": nodes.index(_node(worker, job)), "address": worker.address, "state": worker.state}
    if worker.stats is None:
        return place
    rates = story.meter.of(worker)
    return {
        **place,
        "step": worker.stats.step,
        "step_s": _short(rates.step_s),
        "wait": _short(rates.wait),
        "sent": _short(rates.sent),
        "received": _short(rates.received),
        "resident_bytes": worker.stats.resident_bytes,
        "stuck": [f"{each.collective} for {'; '.join(map(str, each.absent))}" for each in worker.stats.waiting],
        "to": [[rank, _short(flow.network), _short(flow.memory)] for rank, flow in story.meter.flows(worker).items()],
    }


def _mark_late(workers: list[dict[str, Any]], job: JobView, story: Story) -> list[dict[str, Any]]:
    """Add the share of the last seconds for which others waited for each worker, according to the one that waited longest, and whether that
    is much.

    In any training some workers wait for others, and on a crowded machine all do: a worker is late if others wait for it much longer than
    for the rest.
    """
    awaited = {absent.rank for worker in job.workers if worker.stats is not None for each in worker.stats.waiting for absent in each.absent}
    found = story.meter.late(job.workers)
    shares = [share or 0.0 for share in found]
    for each, known, share in zip(workers, found, shares, strict=True):
        others = (sum(shares) - share) / max(1, len(shares) - 1)
        each["late_share"] = _short(known)
        each["late"] = each["rank"] in awaited or share > max(LATE_SHARE, _LATER * others)
    return workers


def _node(worker: WorkerView, job: JobView) -> str:
    """The worker's machine. If it is no longer a member, the others know it."""
    if worker.node:
        return worker.node
    return next((found for other in job.workers if other.stats is not None and (found := _node_of(worker.rank, other.stats))), "")


def _node_of(rank: int, stats: Stats) -> str:
    group = stats.node_groups[rank] if rank < len(stats.node_groups) else len(stats.nodes)
    return stats.nodes[group] if group < len(stats.nodes) else ""


def _here(job: JobView) -> list[WorkerView]:
    return [worker for worker in job.workers if worker.state != GONE]


def _point(point: Point) -> list[float | None]:
    return [round(point.at_s, 1) if name == "at_s" else _short(getattr(point, name)) for name in _COLUMNS]


def _event(number: int, event: Event) -> list[Any]:
    return [number, round(event.at_s, 2), event.what, event.bad]


def _short(value: float | None) -> float | None:
    """The value with as many digits as the page draws; NaN becomes null, because JSON has no NaN."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.5g}") if math.isfinite(value) else None
