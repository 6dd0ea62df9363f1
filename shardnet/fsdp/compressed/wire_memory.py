"""`WireMemory`: buffers for what is packed, between a collective's start and its end."""

import torch

from shardnet.fsdp.memory import Gauge
from shardnet.fsdp.pool import BufferPool

Tensor = torch.Tensor


class WireMemory:
    """Lends counted buffers out of a model's pool; lives as long as the wrapped model."""

    def __init__(self, device: torch.device, gauge: Gauge, pool: BufferPool) -> None:
        self.device = device
        self._gauge = gauge
        self._pool = pool

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor [numel] of undefined content."""
        memory = self._pool.take(numel * dtype.itemsize, self.device)
        self._gauge.add(memory.nbytes())
        return torch.empty(0, dtype=dtype, device=self.device).set_(memory, 0, (numel,), (1,))

    def give(self, taken: Tensor) -> None:
        """Take a tensor back that `take` gave, and that nobody reads or writes any more."""
        self._gauge.remove(taken.nbytes)
        self._pool.give(taken.untyped_storage())
