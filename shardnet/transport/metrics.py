"""A snapshot as Prometheus metrics: the same numbers as `shardnet.v1.Stats`, under the names and in the units that Prometheus uses.

Nothing is counted here. The library is an extra, so this module is imported only where metrics are wanted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from shardnet.pb import stats_pb2

Reply = stats_pb2.SnapshotReply
Values = Mapping[tuple[str, ...], float]  # by the values of the labels


class _Metric(NamedTuple):
    name: str  # without `shardnet_`, and a counter's without `_total`
    help: str
    values: Callable[[Reply], Values]
    labels: Sequence[str] = ()


def _one(value: Callable[[Reply], float]) -> Callable[[Reply], Values]:
    return lambda reply: {(): value(reply)}


def _by_op(value: Callable[[stats_pb2.CollectiveStats], float]) -> Callable[[Reply], Values]:
    return lambda reply: {(each.op,): value(each) for each in reply.collectives}


def _by_job(value: Callable[[stats_pb2.Job], float]) -> Callable[[Reply], Values]:
    return lambda reply: {(each.name,): value(each) for each in reply.jobs}


def _by_latecomer(value: Callable[[stats_pb2.Latecomer], float]) -> Callable[[Reply], Values]:
    return lambda reply: {(str(each.rank),): value(each) for each in reply.late}


def _sent(reply: Reply) -> Values:
    ways = [(str(each.rank), "network", each.sent_network) for each in reply.peers]
    ways += [(str(each.rank), "memory", each.sent_memory) for each in reply.peers]
    return {(peer, way): value for peer, way, value in ways}


def _received(reply: Reply) -> Values:
    ways = [(str(each.rank), "network", each.received_network) for each in reply.peers]
    ways += [(str(each.rank), "memory", each.received_memory) for each in reply.peers]
    return {(peer, way): value for peer, way, value in ways}


def _device_memory(reply: Reply) -> Values:
    memory = reply.memory
    if not memory.device_peak:
        return {}
    return {("allocated",): memory.device_allocated, ("reserved",): memory.device_reserved, ("peak",): memory.device_peak}


# metrics of every process
_PROCESS = (
    _Metric("up", "1 while grpc.health.v1 says SERVING: the epoch is whole, or the rendezvous runs", _one(lambda r: r.serving)),
    _Metric(
        "build",
        "always 1; the labels give the role and the version of the process",
        lambda r: {(r.role, r.version): 1.0},
        ("role", "version"),
    ),
    _Metric("uptime_seconds", "time since the process began to serve", _one(lambda r: r.uptime_s)),
    _Metric("resident_memory_bytes", "memory of the process in RAM", _one(lambda r: r.resident_bytes)),
    _Metric("peak_resident_memory_bytes", "the most memory that the process has had in RAM", _one(lambda r: r.memory.peak_resident)),
)
_RENDEZVOUS = (
    _Metric("job_running", "1 while the job's workers have ranks", _by_job(lambda j: j.state == "running"), ("training_job",)),
    _Metric("job_epoch", "the newest epoch of the job", _by_job(lambda j: j.epoch), ("training_job",)),
    _Metric("job_workers", "members, and workers that wait to become members", _by_job(lambda j: j.joined), ("training_job",)),
    _Metric("job_wanted_workers", "the maximum number of workers of the job", _by_job(lambda j: j.max_world_size), ("training_job",)),
    _Metric(
        "job_absent_workers",
        "members that have no connection to the rendezvous, and may come back",
        _by_job(lambda j: j.absent),
        ("training_job",),
    ),
)
_WORKER = (
    _Metric("shared_memory_bytes", "part of the memory in RAM that is shared with other processes", _one(lambda r: r.memory.shared)),
    _Metric("device_memory_bytes", "memory of all CUDA devices, as counted by torch", _device_memory, ("state",)),
    _Metric("rank", "rank of this worker in this epoch", _one(lambda r: r.rank)),
    _Metric("world_size", "number of ranks in this epoch", _one(lambda r: r.world_size)),
    _Metric("nodes", "number of machines in this epoch", _one(lambda r: len(r.nodes))),
    _Metric("epoch", "number of the membership epoch", _one(lambda r: r.epoch)),
    _Metric("step", "training steps that are done", _one(lambda r: r.step)),
    _Metric("wanted_steps", "training steps that the program plans in all, 0 if it does not say", _one(lambda r: r.progress.total_steps)),
    _Metric("loss", "training loss, as the program reported it last", _one(lambda r: r.progress.loss)),
    _Metric(
        "tokens_per_second",
        "tokens per second of the whole cluster, as the program reported them last",
        _one(lambda r: r.progress.tokens_per_s),
    ),
    _Metric(
        "exposed_communication_ratio",
        "part of the steps' time in which the training thread waited for communication",
        _one(lambda r: _exposed(r.steps)),
    ),
    _Metric("stalled_collectives", "collectives that now wait for ranks that have not entered them", _one(lambda r: len(r.waiting))),
    _Metric(
        "link_bytes_per_second",
        "speed of the connection to the next rank, as measured when the training began",
        _one(lambda r: r.link_bytes_per_s or math.nan),
    ),
)
_WORKER_COUNTERS = (
    _Metric("epochs", "epochs that this worker has been a member of", _one(lambda r: r.epochs)),
    _Metric("lost_peers", "ranks that this rank has lost, in all epochs", _one(lambda r: r.losses)),
    _Metric("exposed_communication_seconds", "time in which the training thread waited for communication", _one(lambda r: r.exposed_s)),
    _Metric("stalls", "collectives that other ranks had not entered after suspect_s", _one(lambda r: r.stalls.count)),
    _Metric("stall_seconds", "time that stalled collectives took", _one(lambda r: r.stalls.seconds)),
    _Metric("bytes_sent", "payload that collectives sent", _one(lambda r: r.bytes_sent)),
    _Metric("bytes_received", "payload that collectives received", _one(lambda r: r.bytes_received)),
    _Metric("stale_chunks", "chunks that were dropped: of another epoch, or of a collective that was over", _one(lambda r: r.stale_chunks)),
    _Metric("collective_failures", "collectives that ended in an error", _by_op(lambda c: c.failed), ("op",)),
    _Metric("collective_bytes_sent", "payload that collectives sent, by kind of collective", _by_op(lambda c: c.bytes), ("op",)),
    _Metric(
        "collective_wait_seconds",
        "part of the collectives' time spent waiting for ranks that had not entered them",
        _by_op(lambda c: c.waited_s),
        ("op",),
    ),
    _Metric(
        "peer_wait_seconds",
        "time spent waiting for a rank to enter collectives, in this epoch",
        _by_latecomer(lambda w: w.seconds),
        ("peer",),
    ),
    _Metric("peer_waits", "number of waits for a rank to enter collectives, in this epoch", _by_latecomer(lambda w: w.count), ("peer",)),
    _Metric("peer_bytes_sent", "payload sent to a rank, in this epoch", _sent, ("peer", "through")),
    _Metric("peer_bytes_received", "payload received from a rank, in this epoch", _received, ("peer", "through")),
)


class SnapshotMetrics(Collector):
    """The metrics of one snapshot."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def collect(self) -> Iterator[Metric]:
        is_worker = self._reply.role == "worker"
        for each in (*_PROCESS, *(_WORKER if is_worker else _RENDEZVOUS)):
            yield _filled(GaugeMetricFamily(f"shardnet_{each.name}", each.help, labels=each.labels), each, self._reply)
        if is_worker:
            for each in _WORKER_COUNTERS:
                yield _filled(CounterMetricFamily(f"shardnet_{each.name}", each.help, labels=each.labels), each, self._reply)
            yield from self._histograms()

    def _histograms(self) -> Iterator[Metric]:
        bounds, steps = self._reply.bounds_s, self._reply.steps
        times = HistogramMetricFamily("shardnet_step_seconds", "time of a training step")
        times.add_metric([], _buckets(bounds, steps.counts), steps.seconds)
        yield times
        latencies = HistogramMetricFamily("shardnet_collective_seconds", "time of a collective, failed ones included", labels=["op"])
        for each in self._reply.collectives:
            latencies.add_metric([each.op], _buckets(bounds, each.counts), each.seconds)
        yield latencies


def render(reply: Reply, accept: str) -> tuple[bytes, str]:
    """The text of a snapshot and its content type, in the format that an Accept header asks for. Takes milliseconds."""
    encode, content_type = choose_encoder(accept)
    return encode(SnapshotMetrics(reply)), content_type


def _filled(family: GaugeMetricFamily | CounterMetricFamily, metric: _Metric, reply: Reply) -> Metric:
    for labels, value in metric.values(reply).items():
        family.add_metric(labels, value)
    return family


def _exposed(steps: stats_pb2.Steps) -> float:
    return steps.exposed_s / steps.seconds if steps.seconds else math.nan


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative buckets, as Prometheus has them: each also counts all values of the buckets below it."""
    return list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))
