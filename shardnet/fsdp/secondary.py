"""`SecondaryShard`: a group's parameters, kept from forward to backward over a few neighbouring ranks.

[Note: secondary shards] With `reshard_after_forward=k` a unit that is freed after forward leaves a second shard behind: one
k-th of the full parameters on each of k ranks. In backward these k ranks gather from each other, and send nothing to other
ranks: if they are the ranks of a node, backward's gathers never leave it. This is hpZ of ZeRO++
(https://arxiv.org/abs/2306.10209) and costs each rank 1/k of the parameters of the units that were freed.

The copy is what its forward computed with, even if the parameters have changed since, and only backward reads it. It is
dropped when a backward ends, when a forward begins, and when a forward ends that no backward can follow. So it cannot be
stale; where backward finds none (another forward came in between, or a reentrant checkpoint ran its forward without
gradients) it gathers from all ranks, as it would without secondary shards. Whether there is one depends only on the
order of forwards and backwards, which is the same on all ranks.
"""

import torch

from shardnet.backend import Backend, Pending
from shardnet.fsdp.memory import Gauge
from shardnet.fsdp.pool import BufferPool
from shardnet.sharding import shard_bounds, shard_sizes

Tensor = torch.Tensor


class SecondaryShard:
    """One group's second shard, there or not; lives as long as the group. See [Note: secondary shards]."""

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, neighbours: Backend, *, gauge: Gauge, pool: BufferPool
    ) -> None:
        self._sizes = shard_sizes(numel, neighbours.world_size)
        self._bounds = slice(*shard_bounds(numel, neighbours.rank, neighbours.world_size))
        self._neighbours = neighbours
        self._dtype = dtype
        self._device = device
        self._gauge = gauge
        self._pool = pool
        self._shard: Tensor | None = None  # [sizes[rank]]

    @property
    def held(self) -> bool:
        return self._shard is not None

    def take(self, full: Tensor) -> None:
        """Copy this rank's part of the full parameters [N], unless that was done already: within a forward they do not change."""
        if self._shard is None:
            part = full[self._bounds]
            memory = self._pool.take(part.nbytes, self._device)
            self._shard = torch.empty(0, dtype=self._dtype, device=self._device).set_(memory, 0, part.shape, (1,)).copy_(part)
            self._gauge.add(part.nbytes)

    def start_gather(self, full: Tensor, label: str) -> Pending[Tensor]:
        """Start filling `full` [N] from the neighbours' shards; all of them must hold one."""
        assert self._shard is not None, label
        own = full[self._bounds].copy_(self._shard)
        return self._neighbours.all_gather(own, sizes=self._sizes, out=full, label=label)

    def drop(self) -> None:
        """Free it, if it is there."""
        if self._shard is not None:
            self._gauge.remove(self._shard.nbytes)
            self._pool.give(self._shard.untyped_storage())
            self._shard = None
