"""The replies of `shardnet.v1.Stats` as values."""

from collections.abc import Sequence

from shardnet.histogram import Histogram
from shardnet.observation.views import Stats, Steps, Stuck
from shardnet.pb import stats_pb2
from shardnet.telemetry import OpCounter, Progress
from shardnet.traffic import Traffic
from shardnet.waiting import Absent


def read_stats(reply: stats_pb2.SnapshotReply) -> Stats:
    return Stats(
        role=reply.role,
        version=reply.version,
        uptime_s=reply.uptime_s,
        rank=reply.rank,
        world_size=reply.world_size,
        local_rank=reply.local_rank,
        epoch=reply.epoch,
        addresses=tuple(reply.addresses),
        step=reply.step,
        progress=read_progress(reply.progress),
        collectives={c.op: OpCounter(c.count, c.failed, c.bytes, c.seconds, c.waited_s, _histogram(c.counts)) for c in reply.collectives},
        bytes_sent=reply.bytes_sent,
        bytes_received=reply.bytes_received,
        stale_chunks=reply.stale_chunks,
        resident_bytes=reply.resident_bytes,
        memory_peers=tuple(reply.memory_peers),
        borrowers=tuple(reply.borrowers),
        routing=reply.routing,
        connections=reply.connections,
        waiting=tuple(Stuck(each.collective, each.seconds, tuple(map(_absent, each.absent))) for each in reply.waiting),
        late={each.rank: each.seconds for each in reply.late},
        nodes=tuple(reply.nodes),
        node_groups=tuple(reply.node_groups),
        epochs=reply.epochs,
        losses=reply.losses,
        bounds_s=tuple(reply.bounds_s),
        steps=Steps(_histogram(reply.steps.counts), reply.steps.seconds, reply.steps.exposed_s),
        exposed_s=reply.exposed_s,
        stalls=reply.stalls.count,
        stall_s=reply.stalls.seconds,
        peers={p.rank: Traffic(p.sent_network, p.sent_memory, p.received_network, p.received_memory) for p in reply.peers},
        link_bytes_per_s=reply.link_bytes_per_s,
        peak_resident_bytes=reply.memory.peak_resident,
        shared_bytes=reply.memory.shared,
        device_bytes=reply.memory.device_allocated,
        device_reserved_bytes=reply.memory.device_reserved,
        device_peak_bytes=reply.memory.device_peak,
        metrics=reply.metrics,
    )


def read_progress(message: stats_pb2.Progress) -> Progress:
    return Progress(
        step=message.step,
        total_steps=message.total_steps,
        loss=message.loss,
        tokens_per_s=message.tokens_per_s,
        exposed_share=message.exposed_share,
        note=message.note,
    )


def _histogram(counts: Sequence[int]) -> Histogram:
    """Empty if the process does not count them because it is of another version."""
    return Histogram(list(counts)) if counts else Histogram()


def _absent(reply: stats_pb2.AbsentRank) -> Absent:
    position = reply.next_sequence if reply.HasField("next_sequence") else None
    return Absent(reply.rank, reply.address, position, reply.last_entered, reply.waits_in)
