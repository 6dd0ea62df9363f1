"""Reading what a process says of itself: [Note: what others say]."""

import math

from shardnet.observation.replies import read_stats
from shardnet.pb import stats_pb2


def test_text_becomes_printable() -> None:
    reply = stats_pb2.SnapshotReply(role="worker", routing="\x1b[2J", metrics="a\nb", addresses=["\x07"], nodes=["\x1b"])
    reply.progress.note = "\r"
    reply.waiting.add(collective="\x1b]0;x\x07").absent.add(rank=1, address="\x1b", last_entered="\n", waits_in="\t")
    reply.collectives.add(op="\x1b")
    stats = read_stats(reply)
    (stuck,) = stats.waiting
    (absent,) = stuck.absent
    texts = [stats.role, stats.routing, stats.metrics, *stats.addresses, *stats.nodes, stats.progress.note, *stats.collectives]
    assert all(text.isprintable() for text in (*texts, stuck.collective, absent.address, absent.last_entered, absent.waits_in))
    assert stats.role == "worker"


def test_times_and_rates_are_finite() -> None:
    for odd in (math.nan, math.inf, -math.inf, -1.0):
        reply = stats_pb2.SnapshotReply(uptime_s=odd, exposed_s=odd, link_bytes_per_s=odd)
        reply.steps.seconds = reply.steps.exposed_s = reply.stalls.seconds = odd
        reply.progress.tokens_per_s = reply.progress.exposed_share = odd
        reply.late.add(rank=1, seconds=odd)
        reply.collectives.add(op="all_gather", seconds=odd, waited_s=odd)
        stats = read_stats(reply)
        (op,) = stats.collectives.values()
        rates = (stats.progress.tokens_per_s, stats.progress.exposed_share, stats.link_bytes_per_s)
        times = (stats.uptime_s, stats.exposed_s, stats.steps.seconds, stats.steps.exposed_s, stats.stall_s, op.seconds, op.waited_s)
        assert {*times, *rates, *stats.late.values()} == {0.0}


def test_a_loss_may_be_nan() -> None:
    reply = stats_pb2.SnapshotReply()
    reply.progress.loss = math.nan
    assert math.isnan(read_stats(reply).progress.loss)


def test_of_what_is_stuck_some_is_read() -> None:
    reply = stats_pb2.SnapshotReply()
    for _ in range(1000):
        reply.waiting.add(collective="x")
    reply.waiting[0].absent.extend([stats_pb2.AbsentRank()] * 1000)
    stats = read_stats(reply)
    assert (len(stats.waiting), len(stats.waiting[0].absent)) == (64, 256)
