"""The replies of `shardnet.v1.Stats` as values.

[Note: what others say] A process that is broken, or not ours, may say anything. What is read here is shown to people and computed with:
text becomes printable, seconds and rates are finite and not negative, and lists of what costs more to read than to send are cut.
"""

import math
from collections.abc import Sequence

from shardnet.histogram import Histogram
from shardnet.observation.views import Stats, Steps, Stuck
from shardnet.pb import stats_pb2
from shardnet.printable import printable
from shardnet.telemetry import OpCounter, Progress
from shardnet.traffic import Traffic
from shardnet.waiting import Absent

_MOST_STUCK = 64  # collectives; there is one for each group of ranks at most
_MOST_ABSENT = 256  # ranks for which one of them waits


def read_stats(reply: stats_pb2.SnapshotReply) -> Stats:
    return Stats(
        role=printable(reply.role),
        version=printable(reply.version),
        uptime_s=_amount(reply.uptime_s),
        rank=reply.rank,
        world_size=reply.world_size,
        local_rank=reply.local_rank,
        epoch=reply.epoch,
        addresses=tuple(map(printable, reply.addresses)),
        step=reply.step,
        progress=read_progress(reply.progress),
        collectives={
            printable(c.op): OpCounter(c.count, c.failed, c.bytes, _amount(c.seconds), _amount(c.waited_s), _histogram(c.counts))
            for c in reply.collectives
        },
        bytes_sent=reply.bytes_sent,
        bytes_received=reply.bytes_received,
        stale_chunks=reply.stale_chunks,
        resident_bytes=reply.resident_bytes,
        memory_peers=tuple(reply.memory_peers),
        borrowers=tuple(reply.borrowers),
        routing=printable(reply.routing),
        connections=printable(reply.connections),
        waiting=tuple(map(_stuck, reply.waiting[:_MOST_STUCK])),
        late={each.rank: _amount(each.seconds) for each in reply.late},
        nodes=tuple(map(printable, reply.nodes)),
        node_groups=tuple(reply.node_groups),
        epochs=reply.epochs,
        losses=reply.losses,
        bounds_s=tuple(reply.bounds_s),
        steps=Steps(_histogram(reply.steps.counts), _amount(reply.steps.seconds), _amount(reply.steps.exposed_s)),
        exposed_s=_amount(reply.exposed_s),
        stalls=reply.stalls.count,
        stall_s=_amount(reply.stalls.seconds),
        peers={p.rank: Traffic(p.sent_network, p.sent_memory, p.received_network, p.received_memory) for p in reply.peers},
        link_bytes_per_s=_amount(reply.link_bytes_per_s),
        peak_resident_bytes=reply.memory.peak_resident,
        shared_bytes=reply.memory.shared,
        device_bytes=reply.memory.device_allocated,
        device_reserved_bytes=reply.memory.device_reserved,
        device_peak_bytes=reply.memory.device_peak,
        metrics=printable(reply.metrics),
    )


def read_progress(message: stats_pb2.Progress) -> Progress:
    return Progress(
        step=message.step,
        total_steps=message.total_steps,
        loss=message.loss,  # which may be NaN in truth
        tokens_per_s=_amount(message.tokens_per_s),
        exposed_share=_amount(message.exposed_share),
        note=printable(message.note),
    )


def _amount(value: float) -> float:
    """Seconds or a rate; 0 for what can be neither."""
    return value if math.isfinite(value) and value > 0 else 0.0


def _stuck(message: stats_pb2.Stuck) -> Stuck:
    return Stuck(printable(message.collective), _amount(message.seconds), tuple(map(_absent, message.absent[:_MOST_ABSENT])))


def _histogram(counts: Sequence[int]) -> Histogram:
    """Empty if the process does not count them because it is of another version."""
    return Histogram(list(counts)) if counts else Histogram()


def _absent(reply: stats_pb2.AbsentRank) -> Absent:
    position = reply.next_sequence if reply.HasField("next_sequence") else None
    return Absent(reply.rank, printable(reply.address), position, printable(reply.last_entered), printable(reply.waits_in))
