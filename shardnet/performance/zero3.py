"""`Zero3PerformanceStats`: the counters that ZeRO-3 systems commonly report.

The formulas are those of other systems, so that figures can be compared, but some of them mislead: tokens are counted
in forward and again in backward, communication that compute hides counts as if it had cost time, and links are
compared with a fixed speed. For figures to decide by, see `TrainingFigures`.
"""

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from shardnet.errors import ProtocolError, UsageError
from shardnet.performance.communication import CommunicationOperation, CommunicationStats, OperationTotals
from shardnet.performance.efficiency import OptimizationEfficiency
from shardnet.performance.layers import LayerTimingStats, average
from shardnet.performance.throughput import ThroughputMetrics
from shardnet.performance.transfers import MemoryTransferMetrics
from shardnet.telemetry import TransferDirection

GRADIENT_BYTES = 4  # of one gradient, as record_gradient_sync estimates


@dataclass(frozen=True, slots=True)
class LayerPerformance:
    """One layer in a summary; times in ns, averages truncated."""

    total_executions: int
    average_forward_time: int
    average_backward_time: int
    total_time: int


@dataclass(frozen=True, slots=True)
class PerformanceSummary:
    """What `get_performance_summary` returns; times in ns, averages truncated, efficiencies from 0 to 1."""

    total_operations: int  # forward + backward + optimizer
    average_forward_time: int
    average_backward_time: int
    average_optimizer_time: int
    tokens_per_second: float
    memory_bandwidth_gbps: float  # in GiB/s
    communication_efficiency: float
    training_efficiency: float
    memory_transfer_efficiency: float
    layer_performance: dict[str, LayerPerformance]


@dataclass(slots=True)
class Zero3PerformanceStats:
    """Counters of one rank, or, after `merge`, of several. Durations are whole nanoseconds. Not for several threads at once."""

    forward_passes: int = 0
    backward_passes: int = 0
    optimizer_steps: int = 0
    total_forward_time: int = 0
    total_backward_time: int = 0
    total_optimizer_time: int = 0
    parameter_transfer_time: int = 0
    gradient_sync_time: int = 0
    layer_timings: dict[str, LayerTimingStats] = field(default_factory=dict)
    throughput_metrics: ThroughputMetrics = field(default_factory=ThroughputMetrics)
    memory_transfer_metrics: MemoryTransferMetrics = field(default_factory=MemoryTransferMetrics)
    communication_stats: CommunicationStats = field(default_factory=CommunicationStats)
    optimization_efficiency: OptimizationEfficiency = field(default_factory=OptimizationEfficiency)

    # --- recording; a negative duration or count raises UsageError, and nothing is recorded

    def record_forward_pass(self, duration: int, tokens: int) -> None:
        _check(duration, tokens)
        self.forward_passes += 1
        self.total_forward_time += duration
        self.throughput_metrics.record_forward(duration, tokens)
        self.optimization_efficiency.record_compute(duration)

    def record_backward_pass(self, duration: int, tokens: int) -> None:
        _check(duration, tokens)
        self.backward_passes += 1
        self.total_backward_time += duration
        self.throughput_metrics.record_backward(duration, tokens)
        self.optimization_efficiency.record_compute(duration)

    def record_optimizer_step(self, duration: int, num_params: int) -> None:
        """`num_params` is how many parameters the step updated; no figure depends on it."""
        _check(duration, num_params)
        self.optimizer_steps += 1
        self.total_optimizer_time += duration
        self.optimization_efficiency.record_compute(duration)

    def record_layer_execution(self, name: str, duration: int) -> None:
        _check(duration)
        self.layer_timings.setdefault(name, LayerTimingStats()).record_forward(duration)

    def record_layer_backward(self, name: str, duration: int) -> None:
        _check(duration)
        self.layer_timings.setdefault(name, LayerTimingStats()).record_backward(duration)

    def record_parameter_transfer(self, duration: int, bytes: int, direction: TransferDirection) -> None:
        """Record that parameters were moved between CPU and GPU."""
        _check(duration, bytes)
        self.memory_transfer_metrics.record(duration, bytes, direction)
        self.parameter_transfer_time += duration

    def record_gradient_sync(
        self,
        duration: int,
        num_gradients: int,
        world_size: int,
        *,
        operation: CommunicationOperation = CommunicationOperation.ALL_REDUCE,
        bytes: int | None = None,
    ) -> None:
        """Record that gradients were reduced: by default one ALL_REDUCE of num_gradients · 4 · world_size bytes."""
        sent = num_gradients * GRADIENT_BYTES * world_size if bytes is None else bytes
        self.record_communication(operation, duration, sent)
        self.gradient_sync_time += duration

    def record_communication(self, operation: CommunicationOperation, duration: int, bytes: int) -> None:
        _check(duration, bytes)
        self.communication_stats.record(operation, duration, bytes)
        self.optimization_efficiency.record_communication(duration)

    # --- reading

    @property
    def average_forward_time(self) -> int:
        return average(self.total_forward_time, self.forward_passes)

    @property
    def average_backward_time(self) -> int:
        return average(self.total_backward_time, self.backward_passes)

    @property
    def average_optimizer_time(self) -> int:
        return average(self.total_optimizer_time, self.optimizer_steps)

    def get_performance_summary(self) -> PerformanceSummary:
        return PerformanceSummary(
            total_operations=self.forward_passes + self.backward_passes + self.optimizer_steps,
            average_forward_time=self.average_forward_time,
            average_backward_time=self.average_backward_time,
            average_optimizer_time=self.average_optimizer_time,
            tokens_per_second=self.throughput_metrics.tokens_per_second,
            memory_bandwidth_gbps=self.memory_transfer_metrics.bandwidth_gbps,
            communication_efficiency=self.communication_stats.communication_efficiency,
            training_efficiency=self.optimization_efficiency.training_efficiency,
            memory_transfer_efficiency=self.memory_transfer_metrics.transfer_efficiency,
            layer_performance={name: _layer(timing) for name, timing in self.layer_timings.items()},
        )

    # --- whole objects

    def reset(self) -> None:
        """Set everything back to its start."""
        new = Zero3PerformanceStats()
        for each in fields(self):
            setattr(self, each.name, getattr(new, each.name))

    def merge(self, other: "Zero3PerformanceStats") -> None:
        """Add another rank's counters; the averages and rates are then those over both."""
        self.forward_passes += other.forward_passes
        self.backward_passes += other.backward_passes
        self.optimizer_steps += other.optimizer_steps
        self.total_forward_time += other.total_forward_time
        self.total_backward_time += other.total_backward_time
        self.total_optimizer_time += other.total_optimizer_time
        self.parameter_transfer_time += other.parameter_transfer_time
        self.gradient_sync_time += other.gradient_sync_time
        for name, timing in other.layer_timings.items():
            self.layer_timings.setdefault(name, LayerTimingStats()).merge(timing)
        self.throughput_metrics.merge(other.throughput_metrics)
        self.memory_transfer_metrics.merge(other.memory_transfer_metrics)
        self.communication_stats.merge(other.communication_stats)
        self.optimization_efficiency.merge(other.optimization_efficiency)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, strings and dicts, for another rank or a file."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Any) -> "Zero3PerformanceStats":
        """What `to_json` gave. Raises ProtocolError for anything else."""
        try:
            given = dict(values)
            communication = dict(given.pop("communication_stats"))
            totals = {CommunicationOperation(name): OperationTotals(**each) for name, each in communication.pop("totals").items()}
            return cls(
                layer_timings={name: LayerTimingStats(**timing) for name, timing in given.pop("layer_timings").items()},
                throughput_metrics=ThroughputMetrics(**given.pop("throughput_metrics")),
                memory_transfer_metrics=MemoryTransferMetrics(**given.pop("memory_transfer_metrics")),
                communication_stats=CommunicationStats(totals=totals, **communication),
                optimization_efficiency=OptimizationEfficiency(**given.pop("optimization_efficiency")),
                **given,
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not the JSON of Zero3PerformanceStats: {error!r}") from error


def _layer(timing: LayerTimingStats) -> LayerPerformance:
    return LayerPerformance(
        total_executions=timing.forward_executions + timing.backward_executions,
        average_forward_time=timing.average_forward_time,
        average_backward_time=timing.average_backward_time,
        total_time=timing.total_forward_time + timing.total_backward_time,
    )


def _check(*values: int) -> None:
    if min(values) < 0:
        raise UsageError(f"durations and counts cannot be negative, got {', '.join(map(str, values))}")
