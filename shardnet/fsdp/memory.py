"""Counting the bytes that a rank holds. Nothing here is estimated: every figure is the size of tensors that exist."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardnet.fsdp.wrapper import FSDP


@dataclass(slots=True)
class Gauge:
    """Bytes held now, and the most that were held at once."""

    current_bytes: int = 0
    peak_bytes: int = 0

    def add(self, count: int) -> None:
        self.current_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)

    def remove(self, count: int) -> None:
        self.current_bytes -= count

    def reset_peak(self) -> None:
        self.peak_bytes = self.current_bytes


@dataclass(slots=True)
class MemoryMeter:
    """The buffers that come and go in a step of one model, reported by the code that allocates and frees them."""

    full_parameters: Gauge = field(default_factory=Gauge)
    full_gradients: Gauge = field(default_factory=Gauge)
    secondary_shards: Gauge = field(default_factory=Gauge)
    packed: Gauge = field(default_factory=Gauge)
    residuals: Gauge = field(default_factory=Gauge)
    pooled_bytes: int = 0  # memory of freed buffers that waits for the next one

    @property
    def unused_bytes(self) -> int:
        """How many bytes fewer are in use now than at the peaks."""
        return sum(gauge.peak_bytes - gauge.current_bytes for gauge in self._gauges)

    def reset_peaks(self) -> None:
        for gauge in self._gauges:
            gauge.reset_peak()

    @property
    def _gauges(self) -> tuple[Gauge, ...]:
        return (self.full_parameters, self.full_gradients, self.secondary_shards, self.packed, self.residuals)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What one rank holds, in bytes."""

    parameter_shards: int
    gradient_shards: int
    optimizer_state: int
    ignored: int  # parameters of ignored modules and their gradients, whole on every rank
    full_parameters: int  # gathered at this moment; in memory that the ranks of a node share, where they share any
    full_gradients: int  # full-size gradients waiting for, or in, a reduction
    secondary_shards: int  # kept for backward with reshard_after_forward=k
    gradient_residuals: int  # what Compression's rounding took from full-size gradients, for the next step
    packed: int  # what Compression sends, and the parameters that it gathers, from start to end of a collective
    pooled: int  # memory of freed buffers that waits for the next one
    peak_full_parameters: int  # the most gathered at once since the start or `reset_peaks()`
    peak_full_gradients: int
    peak_secondary_shards: int
    peak_packed: int

    @property
    def persistent(self) -> int:
        """What is held between steps."""
        return self.parameter_shards + self.gradient_shards + self.optimizer_state + self.gradient_residuals + self.ignored


def memory_report(model: "FSDP", optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
    """Count this rank's bytes: shards of parameters, gradients and optimizer state, and full-size buffers. No traffic."""
    meter = model.memory
    shards = {parameter for group in model.groups for parameter in group.originals}
    ignored = [parameter for parameter in model.parameters() if parameter not in shards]
    state = () if optimizer is None else (value for entry in optimizer.state.values() for value in entry.values())
    return MemoryReport(
        parameter_shards=sum(group.shard.nbytes for group in model.groups),
        gradient_shards=_bytes(parameter.grad for parameter in shards),
        optimizer_state=_bytes(state),
        ignored=_bytes(ignored) + _bytes(parameter.grad for parameter in ignored),
        full_parameters=meter.full_parameters.current_bytes,
        full_gradients=meter.full_gradients.current_bytes,
        secondary_shards=meter.secondary_shards.current_bytes,
        gradient_residuals=meter.residuals.current_bytes,
        packed=meter.packed.current_bytes,
        pooled=meter.pooled_bytes,
        peak_full_parameters=meter.full_parameters.peak_bytes,
        peak_full_gradients=meter.full_gradients.peak_bytes,
        peak_secondary_shards=meter.secondary_shards.peak_bytes,
        peak_packed=meter.packed.peak_bytes,
    )


def _bytes(values: Iterable[object]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
