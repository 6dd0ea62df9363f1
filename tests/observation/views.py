"""Made-up looks at a cluster."""

from dataclasses import replace
from typing import Any

from shardnet.observation.replies import read_stats
from shardnet.observation.views import ClusterView, JobView, Stats, WorkerView
from shardnet.pb import stats_pb2

RENDEZVOUS = read_stats(stats_pb2.SnapshotReply(role="rendezvous", version="1", uptime_s=9.0, connections="plaintext"))


def stats(**facts: Any) -> Stats:
    """The statistics that a worker reports."""
    reply = stats_pb2.SnapshotReply(role="worker", uptime_s=100.0, progress=stats_pb2.Progress(loss=float("nan")))
    return replace(read_stats(reply), **facts)


def worker(rank: int, said: Stats | None = None, *, state: str = "serving") -> WorkerView:
    return WorkerView(rank, f"node-{rank}/boot", f"10.0.0.{rank}:7001", state, said)


def cluster(*workers: WorkerView, epoch: int = 1, state: str = "running", **facts: Any) -> ClusterView:
    job = JobView("lm", state, epoch, len(workers), 1, 4, workers)
    return ClusterView("10.0.0.9:7000", "serving", RENDEZVOUS, (replace(job, **facts),))
