"""Compare plans of compressed communication with counts of what real training holds and sends."""

import pytest
import torch

from shardnet.backend import Backend
from shardnet.config import Limits
from shardnet.fsdp import FSDP, Compression, MemoryReport, MixedPrecision, memory_report
from shardnet.fsdp.compressed.across import Crossing
from shardnet.fsdp.compressed.reduction import Exchange
from shardnet.planning import MemoryPlan, Setting, Strategy, plan
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks
from tests.planning.test_measured import FULL, GRAD, HYBRID, SIZES, STEPS, columns, counted, size

PLACES = [(FULL, 2, None), (FULL, 4, None), (GRAD, 3, None), (HYBRID, 4, 2), (HYBRID, 2, 1), (FULL, 1, None), (FULL, 4, 2), (GRAD, 6, 3)]
MODES = [
    Compression(weights="bfloat16"),
    Compression(weights="int8", block=64),
    Compression(gradients="int8"),
    Compression(gradients="int8", residual=None),
    Compression(weights="bfloat16", gradients="int8", residual=torch.float32),
    Compression(weights="int8", gradients="int8"),
]


def train(
    ranks: int, strategy: Strategy, node: int | None, compression: Compression, prefetch: int = 1, precision: MixedPrecision | None = None
) -> list[tuple[MemoryReport, dict[str, int]]]:
    """Each rank's memory, and what it sent in the last step, by operation."""

    def work(backend: Backend) -> tuple[MemoryReport, dict[str, int]]:
        inner, place = make_gpt(**SIZES), {"strategy": ShardingStrategy(strategy), "intra_node_size": node if strategy is HYBRID else None}
        model = FSDP(inner, backend, units=Block, prefetch=prefetch, compression=compression, mixed_precision=precision, **place)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(model.parameters())
        model.memory.reset_peaks()
        for batch in token_batches(STEPS, 2):
            before = {op: counter.bytes for op, counter in backend.telemetry.ops.items()}
            optimizer.zero_grad()
            loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        sent = {op: counter.bytes - before.get(op, 0) for op, counter in backend.telemetry.ops.items()}
        return memory_report(model, optimizer), {op: count for op, count in sent.items() if count}

    return run_ranks(ranks, work, limits=Limits(eager_bytes=0), ranks_per_node=node)


def planned_columns(memory: MemoryPlan) -> list[int]:
    return [*columns(memory), memory.residuals]


def counted_columns(report: MemoryReport) -> list[int]:
    return [*counted(report), report.gradient_residuals]


@pytest.mark.parametrize("compression", MODES, ids=str)
@pytest.mark.parametrize(("strategy", "ranks", "node"), PLACES)
def test_memory_and_traffic_are_those_of_a_run(
    strategy: Strategy, ranks: int, node: int | None, compression: Compression, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Crossing, "is_read", False)  # ranks that read full gradients quickly hold fewer of them
    (planned,) = plan(size(), Setting(ranks, node_size=node, compression=compression), [strategy])
    runs = train(ranks, strategy, node, compression)
    report = runs[0][0]
    assert planned_columns(planned.memory) == counted_columns(report)  # to the byte: rank 0 has the longest shards
    assert planned.memory.packed >= report.peak_packed  # less is in flight if the network is fast
    assert planned.memory.total == pytest.approx(sum(counted_columns(report)) + report.peak_packed, rel=0.1)
    expected: dict[str, int] = {}
    for traffic in planned.traffic:
        expected[traffic.op] = expected.get(traffic.op, 0) + ranks * traffic.bytes_sent
    sent = {op: sum(ops.get(op, 0) for _, ops in runs) for op in {op for _, ops in runs for op in ops}}
    assert sent == pytest.approx(expected, rel=0.01)


WHERE = [(FULL, 2, None), (GRAD, 2, None), (HYBRID, 4, 2), (FULL, 4, 2)]
# Each pair of a mode and a place, a mode and a prefetch, or a place and a prefetch occurs.
PAIRS = [(mode, *WHERE[place], (row + place) % 3) for row, mode in enumerate(MODES[1:]) for place in range(4)]


@pytest.mark.parametrize(("compression", "strategy", "ranks", "node", "prefetch"), PAIRS, ids=str)
def test_as_much_is_packed_where_nothing_arrives_before_it_is_waited_for(
    compression: Compression, strategy: Strategy, ranks: int, node: int | None, prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exchange, "arrived", False)
    monkeypatch.setattr(Crossing, "is_read", False)
    setting = Setting(ranks, node_size=node, prefetch=prefetch, compression=compression)
    (planned,) = plan(size(), setting, [strategy])
    reports = [report for report, _ in train(ranks, strategy, node, compression, prefetch)]
    assert [report.peak_full_gradients for report in reports] == [planned.memory.reducing] * ranks
    assert max(report.peak_packed for report in reports) == planned.memory.packed  # rank 0 has the longest shards
    assert min(report.peak_packed for report in reports) == pytest.approx(planned.memory.packed, rel=0.001)


def test_mixed_precision_beside_compression() -> None:
    compression, half = Compression(weights="int8", gradients="int8"), torch.bfloat16
    (planned,) = plan(size(), Setting(2, compute_dtype=half, compression=compression), [FULL])
    runs = train(2, FULL, None, compression, precision=MixedPrecision(half))
    assert planned_columns(planned.memory) == counted_columns(runs[0][0])
    assert sum(sum(sent.values()) for _, sent in runs) == pytest.approx(2 * planned.bytes_sent, rel=0.01)
