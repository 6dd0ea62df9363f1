"""What the ranks do in test_floods.py, each in a process of its own: rank 2 floods rank 0; ranks 0 and 1 work on in their own group."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress

import psutil
import torch

from shardnet.backend import Backend
from shardnet.backend.cluster import ClusterBackend
from shardnet.errors import PeerLost
from shardnet.loop import LoopThread
from shardnet.transport.http2 import CallBroken
from shardnet.wire import Chunk, encode
from tests.faults.ports import mesh_of

_BATCH = 200  # chunks, after which the loop may do other things
MOST = 400_000  # chunks, if nobody stops it


def flood(backend: ClusterBackend, kind: str, rounds: int) -> dict[str, float]:
    """`kind` says what the chunks belong to: a group that nobody has made, collectives to come, or one that is over."""
    pair = backend.subgroup((0, 1)) if backend.rank < 2 else None
    backend.barrier(timeout_s=120.0).wait(120.0)
    if pair is None:
        backend.barrier(timeout_s=120.0).wait(120.0)
        sent, took_s = LoopThread.shared().run(_pour(backend, kind)).result(40.0)
        return {"sent": sent, "took_s": took_s}
    _latencies(pair, 500)
    before_s, before = _latencies(pair, rounds), psutil.Process().memory_info().rss
    backend.barrier(timeout_s=120.0).wait(120.0)
    flooded_s = _latencies(pair, rounds)
    after_s = _latencies(pair, rounds)
    grown = psutil.Process().memory_info().rss - before
    try:
        backend.barrier().wait(30.0)
        lost = -1
    except PeerLost as error:
        lost = error.rank
    return {"quiet_p95_s": max(_p95(before_s), _p95(after_s)), "flooded_p95_s": _p95(flooded_s), "grown_bytes": grown, "lost": lost}


def _latencies(pair: Backend, rounds: int) -> list[float]:
    took_s, ones = [], torch.ones(1000)
    for _ in range(rounds):
        started_s = time.perf_counter()
        total = pair.all_reduce(ones).wait(10.0)
        took_s.append(time.perf_counter() - started_s)
        assert torch.equal(total, ones * 2)
    return took_s


def _p95(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


async def _pour(backend: ClusterBackend, kind: str) -> tuple[int, float]:
    """Send tiny chunks until the stream is cut; return how many went out, and how long that took."""
    group, sequence = {"a group that nobody has made": (77, 0), "collectives to come": (0, 1000), "one that is over": (0, 0)}[kind]
    frame = b"".join(encode(Chunk(backend._board.mesh.epoch, group, sequence, data=b"tiny")))
    outbox, started_s = mesh_of(backend)._outboxes[0], time.monotonic()
    sent = 0
    with suppress(PeerLost, CallBroken):
        for _ in range(0, MOST, _BATCH):
            call = outbox._open()
            for _ in range(_BATCH):
                call.send_now(frame)
            sent += _BATCH
            await asyncio.sleep(0.001)  # the flooder's own pace, which still lets it notice that it is cut off
    return sent, time.monotonic() - started_s
