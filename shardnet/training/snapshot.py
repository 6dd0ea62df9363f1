"""One worker's answer to `shardnet.v1.Stats`."""

import psutil

from shardnet.pb import stats_pb2
from shardnet.telemetry import Telemetry
from shardnet.topology import Topology
from shardnet.version import VERSION
from shardnet.waiting import Waiting


def worker_snapshot(telemetry: Telemetry, topology: Topology | None) -> stats_pb2.SnapshotReply:
    """What there is to say now; `topology` is None until the world is formed."""
    progress = telemetry.progress
    reply = stats_pb2.SnapshotReply(
        role="worker",
        version=VERSION,
        uptime_s=telemetry.uptime_s,
        step=telemetry.step,
        progress=stats_pb2.Progress(
            step=progress.step,
            total_steps=progress.total_steps,
            loss=progress.loss,
            tokens_per_s=progress.tokens_per_s,
            exposed_share=progress.exposed_share,
            note=progress.note,
        ),
        bytes_sent=telemetry.bytes_sent,
        bytes_received=telemetry.bytes_received,
        stale_chunks=telemetry.stale_chunks,
        memory_peers=sorted(telemetry.memory_peers),
        borrowers=sorted(telemetry.borrowers),
        routing=telemetry.routing,
        resident_bytes=psutil.Process().memory_info().rss,
        collectives=[
            stats_pb2.CollectiveStats(op=op, count=c.count, bytes=c.bytes, seconds=c.seconds, waited_s=c.waited_s, failed=c.failed)
            for op, c in sorted(telemetry.ops.copy().items())
        ],
        late=[stats_pb2.Latecomer(rank=rank, count=c.count, seconds=c.seconds) for rank, c in sorted(telemetry.late.copy().items())],
        waiting=[_waiting(each) for each in telemetry.waiting if not each.is_over],
    )
    if topology is not None:
        me = topology.me
        reply.rank, reply.world_size, reply.epoch = topology.rank, topology.world_size, topology.epoch
        reply.local_rank, reply.node_group = me.local_rank, me.node_group
        reply.addresses.extend(member.address for member in topology.members)
    return reply


def _waiting(waiting: Waiting) -> stats_pb2.Stuck:
    absent = [
        stats_pb2.AbsentRank(rank=each.rank, address=each.address, next_sequence=each.next_sequence, last_entered=each.last_entered)
        for each in waiting.absent
    ]
    return stats_pb2.Stuck(collective=waiting.flight.full_name, seconds=waiting.seconds, absent=absent)
