"""The counters that ZeRO-3 systems report: their formulas, number by number."""

import json

import pytest

from shardnet.errors import ProtocolError, UsageError
from shardnet.performance import CommunicationOperation, LayerPerformance, PerformanceSummary, TransferDirection, Zero3PerformanceStats

MS = 1_000_000  # ns
S = 1_000 * MS


def filled(scale: int = 1) -> Zero3PerformanceStats:
    """Statistics with records of every kind."""
    stats = Zero3PerformanceStats()
    stats.record_forward_pass(100 * MS * scale, 1000)
    stats.record_backward_pass(150 * MS * scale, 1000)
    stats.record_optimizer_step(50 * MS * scale, 1_000_000)
    stats.record_layer_execution("first", 10 * scale)
    stats.record_layer_execution("first", 15 * scale)
    stats.record_layer_backward("first", 30 * scale)
    stats.record_parameter_transfer(S, 1000 * scale, TransferDirection.CPU_TO_GPU)
    stats.record_gradient_sync(100 * MS, 1_000_000, 4)
    stats.record_communication(CommunicationOperation.ALL_GATHER, 20 * MS * scale, 500)
    return stats


def test_it_starts_empty() -> None:
    stats = Zero3PerformanceStats()
    assert stats.get_performance_summary() == PerformanceSummary(0, 0, 0, 0, 0.0, 0.0, 1.0, 1.0, 1.0, {})
    assert [totals.operations for totals in stats.communication_stats.totals.values()] == [0] * 5


def test_tokens_per_second() -> None:
    stats = Zero3PerformanceStats()
    stats.record_forward_pass(100 * MS, 1000)
    stats.record_backward_pass(150 * MS, 1000)
    stats.record_optimizer_step(50 * MS, 1_000_000)
    summary, throughput = stats.get_performance_summary(), stats.throughput_metrics
    assert summary.tokens_per_second == pytest.approx(8000)
    assert throughput.peak_tokens_per_second == pytest.approx(10_000)
    assert throughput.rolling_average_tps == pytest.approx(9666.6667)
    assert throughput.rolling_samples == 2
    assert (stats.forward_passes, stats.backward_passes, stats.optimizer_steps) == (1, 1, 1)
    assert (stats.total_forward_time, stats.total_backward_time, stats.total_optimizer_time) == (100 * MS, 150 * MS, 50 * MS)
    assert (summary.total_operations, stats.optimization_efficiency.compute_time) == (3, 300 * MS)


def test_averages_truncate() -> None:
    stats = Zero3PerformanceStats()
    for duration in (1, 1, 3):
        stats.record_forward_pass(duration, 0)
        stats.record_layer_backward("layer", duration)
    assert stats.get_performance_summary().average_forward_time == 1
    assert stats.get_performance_summary().layer_performance == {"layer": LayerPerformance(3, 0, 1, 5)}


def test_layers_have_a_total_and_extremes() -> None:
    layer = filled().layer_timings["first"]
    assert (layer.forward_executions, layer.total_forward_time, layer.min_forward_time, layer.max_forward_time) == (2, 25, 10, 15)
    assert (layer.backward_executions, layer.total_backward_time, layer.min_backward_time, layer.max_backward_time) == (1, 30, 30, 30)
    assert filled().get_performance_summary().layer_performance["first"] == LayerPerformance(3, 12, 30, 55)


def test_a_thousand_bytes_in_a_second() -> None:
    stats = Zero3PerformanceStats()
    stats.record_parameter_transfer(S, 1000, TransferDirection.CPU_TO_GPU)
    summary = stats.get_performance_summary()
    assert summary.memory_bandwidth_gbps == pytest.approx(9.3132e-7, rel=1e-4)
    assert summary.memory_transfer_efficiency == pytest.approx(1e-6)
    assert (stats.parameter_transfer_time, stats.memory_transfer_metrics.peak_bandwidth) == (S, 1000)


def test_transfers_are_told_apart_by_direction_and_efficiency_ends_at_1() -> None:
    stats = Zero3PerformanceStats()
    stats.record_parameter_transfer(S, 3 * 10**9, TransferDirection.GPU_TO_CPU)
    stats.record_parameter_transfer(S, 10**9, TransferDirection.CPU_TO_GPU)
    metrics = stats.memory_transfer_metrics
    assert (metrics.gpu_to_cpu_transfers, metrics.gpu_to_cpu_bytes, metrics.cpu_to_gpu_bytes) == (1, 3 * 10**9, 10**9)
    assert (metrics.bandwidth, metrics.peak_bandwidth, metrics.transfer_efficiency) == (2e9, 3e9, 1.0)


def test_gradient_sync_of_a_million_gradients() -> None:
    stats = Zero3PerformanceStats()
    stats.record_gradient_sync(100 * MS, 1_000_000, 4)
    all_reduce = stats.communication_stats.totals[CommunicationOperation.ALL_REDUCE]
    assert (all_reduce.operations, all_reduce.time, all_reduce.bytes) == (1, 100 * MS, 16_000_000)
    assert stats.get_performance_summary().communication_efficiency == pytest.approx(0.016)
    assert stats.gradient_sync_time == 100 * MS


def test_gradient_sync_takes_what_was_really_sent() -> None:
    stats = Zero3PerformanceStats()
    stats.record_gradient_sync(MS, 1_000_000, 4, operation=CommunicationOperation.REDUCE_SCATTER, bytes=3_000_000)
    totals = stats.communication_stats.totals
    assert totals[CommunicationOperation.REDUCE_SCATTER].bytes == 3_000_000
    assert totals[CommunicationOperation.ALL_REDUCE].operations == 0


@pytest.mark.parametrize("operation", list(CommunicationOperation))
def test_communication_by_operation(operation: CommunicationOperation) -> None:
    stats = Zero3PerformanceStats()
    stats.record_communication(operation, 0, 10**9)
    assert stats.communication_stats.communication_efficiency == 1.0  # no time yet
    stats.record_communication(operation, S, 10**9)
    totals = stats.communication_stats.totals.pop(operation)
    assert (totals.operations, totals.time, totals.bytes, totals.bandwidth) == (2, S, 2 * 10**9, 2e9)
    assert stats.communication_stats.communication_efficiency == pytest.approx(0.2)
    assert not any(others.operations for others in stats.communication_stats.totals.values())


def test_communication_without_bytes_leaves_the_efficiency() -> None:
    stats = Zero3PerformanceStats()
    stats.record_communication(CommunicationOperation.BROADCAST, S, 0)
    assert stats.communication_stats.communication_efficiency == 1.0


def test_800_ms_of_compute_and_200_of_communication() -> None:
    stats = Zero3PerformanceStats()
    stats.record_forward_pass(800 * MS, 0)
    stats.record_communication(CommunicationOperation.ALL_REDUCE, 200 * MS, 1)
    efficiency = stats.optimization_efficiency
    assert [efficiency.compute_ratio, efficiency.communication_ratio] == pytest.approx([0.8, 0.2])
    assert stats.get_performance_summary().training_efficiency == pytest.approx(0.5 * 0.8 + 0.3 + 0.2)
    efficiency.update_memory_efficiency(0.5)
    efficiency.update_parameter_efficiency(-3)  # is clamped
    assert efficiency.training_efficiency == pytest.approx(0.5 * 0.8 + 0.3 * 0.5)


def test_reset_is_new() -> None:
    stats = filled()
    layers = stats.layer_timings
    stats.reset()
    assert stats == Zero3PerformanceStats()
    assert layers  # an object that a caller has taken from it stays as it was


def test_merge_adds_and_keeps_extremes() -> None:
    stats, other = filled(), filled(scale=2)
    stats.merge(other)
    assert (stats.forward_passes, stats.backward_passes, stats.optimizer_steps) == (2, 2, 2)
    assert (stats.total_forward_time, stats.total_backward_time, stats.total_optimizer_time) == (300 * MS, 450 * MS, 150 * MS)
    assert (stats.parameter_transfer_time, stats.gradient_sync_time) == (2 * S, 200 * MS)
    layer = stats.layer_timings["first"]
    assert (layer.forward_executions, layer.min_forward_time, layer.max_forward_time) == (4, 10, 30)
    assert (layer.total_backward_time, layer.min_backward_time, layer.max_backward_time) == (90, 30, 60)
    assert stats.get_performance_summary().tokens_per_second == pytest.approx(4000 / 0.75)
    assert stats.memory_transfer_metrics.bandwidth == pytest.approx(1500)
    assert stats.memory_transfer_metrics.transfer_efficiency == pytest.approx(1.5e-6)
    assert stats.communication_stats.totals[CommunicationOperation.ALL_REDUCE].bytes == 32_000_000
    assert stats.communication_stats.communication_efficiency == pytest.approx(32_001_000 / 0.26 / 1e10)
    assert stats.optimization_efficiency.compute_time == 900 * MS
    assert other == filled(scale=2)


def test_merge_takes_the_higher_peak_and_weights_rolling_averages_by_samples() -> None:
    left, right = Zero3PerformanceStats(), Zero3PerformanceStats()
    left.record_forward_pass(S, 100)
    for _ in range(3):
        right.record_forward_pass(S, 500)
    left.merge(right)
    assert left.throughput_metrics.peak_tokens_per_second == 500
    assert left.throughput_metrics.rolling_average_tps == pytest.approx((100 + 3 * 500) / 4)
    assert left.throughput_metrics.rolling_samples == 4


def test_merge_with_nothing_changes_nothing() -> None:
    stats = filled()
    stats.merge(Zero3PerformanceStats())
    assert stats == filled()
    empty = Zero3PerformanceStats()
    empty.merge(Zero3PerformanceStats())
    assert empty == Zero3PerformanceStats()


@pytest.mark.parametrize("stats", [Zero3PerformanceStats(), filled()])
def test_it_travels_as_json(stats: Zero3PerformanceStats) -> None:
    assert Zero3PerformanceStats.from_json(json.loads(json.dumps(stats.to_json()))) == stats


@pytest.mark.parametrize("strange", [None, [], {}, {**Zero3PerformanceStats().to_json(), "more": 1}])
def test_what_is_none_is_refused(strange: object) -> None:
    with pytest.raises(ProtocolError, match="not the JSON of Zero3PerformanceStats"):
        Zero3PerformanceStats.from_json(strange)


@pytest.mark.parametrize(
    ("record", "values"),
    [
        ("forward_pass", (-1, 1)),
        ("backward_pass", (1, -1)),
        ("optimizer_step", (-1, 1)),
        ("layer_execution", ("layer", -1)),
        ("parameter_transfer", (1, -1, TransferDirection.CPU_TO_GPU)),
        ("gradient_sync", (1, -1, 4)),
        ("communication", (CommunicationOperation.BROADCAST, -1, 1)),
    ],
)
def test_negative_values_are_refused_and_change_nothing(record: str, values: tuple[object, ...]) -> None:
    stats = Zero3PerformanceStats()
    with pytest.raises(UsageError, match="cannot be negative"):
        getattr(stats, f"record_{record}")(*values)
    assert stats == Zero3PerformanceStats()
