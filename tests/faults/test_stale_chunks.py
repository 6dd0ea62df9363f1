"""Chunks that come a second time, or from an epoch that is over: none is applied, and each is counted."""

import asyncio
import random
from collections.abc import Sequence

import pytest
import torch

from shardnet.backend.cluster import ClusterBackend
from shardnet.config import KIB, Limits, Timeouts
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.training.snapshot import worker_snapshot
from shardnet.transport.outbox import Outbox
from shardnet.wire import Chunk, encode
from tests.faults.ledger import scenario
from tests.faults.ports import dissolve, mesh_of, ports

SEED = 20_261_126
SHORT = 200
RANKS = 3
TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits(chunk_bytes=4 * KIB, eager_bytes=2 * KIB, window_bytes=16 * KIB, letter_bytes=0)


class Tape:
    """What each rank has put on its streams, by sender and receiver."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.heard: dict[Outbox, list[bytes]] = {}
        put = Outbox.put

        async def taped(outbox: Outbox, chunk: Chunk) -> None:
            self.heard.setdefault(outbox, []).append(b"".join(encode(chunk)))
            await put(outbox, chunk)

        patch.setattr(Outbox, "put", taped)


@pytest.mark.parametrize("count", [SHORT, pytest.param(5000, marks=pytest.mark.faults)])
def test_stale_chunks(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inject chunks between those of collectives, whose results stay right: unchanged chunks of earlier collectives, and chunks for the one
    under way but from the epoch before, with aborts, losses and goodbyes among them."""
    with scenario("replayed and stale-epoch chunks", SEED, kept=count > SHORT) as figures:
        injected, counted = LoopThread.shared().run(_replay(Tape(monkeypatch), count)).result(500.0)
        figures.repeats = sum(injected)
        figures.measured["counted"] = sum(counted)
        assert counted == injected
        assert sum(injected) >= count


async def _replay(tape: Tape, count: int) -> tuple[list[int], list[int]]:
    rng, injected = random.Random(SEED), [0] * RANKS
    async with ports(RANKS, timeouts=TIMEOUTS, limits=LIMITS) as pool:
        ranks = await pool.form()
        await _sum(ranks, rng.choice((10, 900, 9000)))
        before = {frame for frames in tape.heard.values() for frame in frames}  # of the epoch before
        await dissolve(ranks)
        tape.heard.clear()
        ranks = await pool.form()
        while sum(injected) < count:
            rows = rng.choice((10, 900, 9000))
            over = {outbox: list(frames) for outbox, frames in tape.heard.items()}
            under_way = asyncio.ensure_future(_sum(ranks, rows))
            for _ in range(20):
                await asyncio.sleep(0)
                sender, receiver = rng.sample(range(RANKS), 2)
                outbox = mesh_of(ranks[sender])._outboxes[receiver]
                frame = rng.choice([*over.get(outbox, ()), rng.choice(sorted(before)), _of_the_epoch_before(rng, ranks[0])])
                outbox._open().send_now(frame)
                injected[receiver] += 1
            await under_way
        await _sum(ranks, 10)  # after everything that was injected
        counted = [int(worker_snapshot(rank.telemetry, None).stale_chunks) for rank in ranks]
        await dissolve(ranks)
    return injected, counted


async def _sum(ranks: Sequence[ClusterBackend], rows: int) -> None:
    """Sum halves, so that an extra addition would be seen."""
    sums = await asyncio.gather(*(rank.all_reduce(torch.full((rows,), 0.5 + rank.rank)) for rank in ranks))
    assert all(torch.equal(each, torch.full((rows,), 4.5)) for each in sums)


def _of_the_epoch_before(rng: random.Random, rank: ClusterBackend) -> bytes:
    """A chunk that would harm the collective under way if nobody looked at its epoch."""
    sequence = rank._board.world._ledger._next - 1
    control = rng.choice(
        (
            None,
            mesh_pb2.Control(abort=mesh_pb2.Abort(reason=mesh_pb2.Abort.FAILED, detail="of another epoch")),
            mesh_pb2.Control(loss=mesh_pb2.Loss(rank=1)),
            mesh_pb2.Control(goodbye=mesh_pb2.Goodbye()),
            mesh_pb2.Control(window_answer=mesh_pb2.WindowAnswer()),
        )
    )
    chunk = Chunk(rank._board.mesh.epoch - 1, 0, sequence, data=bytes(40) if control is None else b"", control=control)
    return b"".join(encode(chunk))
