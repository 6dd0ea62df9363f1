"""The two engines, with the same collectives under the same names. Every call returns when the result is there."""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from shardnet import Backend
from shardnet.backend import NodeBuffer


class Engine(Protocol):
    @property
    def name(self) -> str: ...

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        """[k] → [k · ranks]"""

    def reduce_scatter(self, full: Tensor, out: Tensor) -> None:
        """[k · ranks] → [k], summed; `full` stays as it is."""

    def all_reduce(self, tensor: Tensor) -> None:
        """[n] → [n], summed in place."""

    def all_reduce_at_once(self, tensors: Sequence[Tensor]) -> None:
        """Start all of them before waiting for the first one."""

    def gather_on_node(self, shard: Tensor, out: Tensor) -> Tensor:
        """[k] → [k · ranks], in `out` or in memory that is good until the next call."""


class Shardnet:
    name = "shardnet"

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffer: NodeBuffer | None = None

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        self._backend.all_gather(shard, out=out).wait()

    def reduce_scatter(self, full: Tensor, out: Tensor) -> None:
        self._backend.reduce_scatter(full, out=out).wait()

    def all_reduce(self, tensor: Tensor) -> None:
        self._backend.all_reduce(tensor, out=tensor).wait()

    def all_reduce_at_once(self, tensors: Sequence[Tensor]) -> None:
        for handle in [self._backend.all_reduce(tensor, out=tensor) for tensor in tensors]:
            handle.wait()

    def gather_on_node(self, shard: Tensor, out: Tensor) -> Tensor:
        if self._buffer is not None:
            self._buffer.release()
        self._buffer = self._backend.all_gather_on_node(shard).wait()
        return self._buffer.tensor


class Gloo:
    """Over torch's default process group."""

    name = "gloo"

    def all_gather(self, shard: Tensor, out: Tensor) -> None:
        dist.all_gather_into_tensor(out, shard)

    def reduce_scatter(self, full: Tensor, out: Tensor) -> None:
        dist.reduce_scatter_tensor(out, full)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor)

    def all_reduce_at_once(self, tensors: Sequence[Tensor]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    def gather_on_node(self, shard: Tensor, out: Tensor) -> Tensor:
        self.all_gather(shard, out)
        return out
