"""`GradientBuffer`: the full-size gradients of one group until they are reduced."""

import torch

from shardnet.fsdp.memory import Gauge
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.precision import Dtypes
from shardnet.sharding import FlatLayout

Tensor = torch.Tensor


class GradientBuffer:
    """Collects gradients parameter by parameter into one flat buffer [N] of the group's layout.

    The buffer exists from the first gradient until `take`. Gradients of several backward passes add up (`no_sync`): in
    float32 at least, since a 16-bit running sum stops growing. They are rounded to the dtype of the reduction once, by `take`.
    """

    def __init__(self, layout: FlatLayout, dtypes: Dtypes, device: torch.device, *, gauge: Gauge, pool: BufferPool) -> None:
        self._layout = layout
        self._dtypes = dtypes
        self._device = device
        self._gauge = gauge
        self._pool = pool
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._filled: set[int] = set()

    @property
    def empty(self) -> bool:
        return self._flat is None

    def add(self, index: int, gradient: Tensor) -> None:
        """Add the gradient of the index-th parameter, in that parameter's shape."""
        flat = self._allocate()
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if index in self._filled:
            self._convert(flat, torch.promote_types(flat.dtype, torch.float32))
            self._views[index].add_(dense)
        else:
            self._views[index].copy_(dense)
            self._filled.add(index)

    def outlive_backward(self) -> None:
        """More will be added to the gradients later. Nothing to do: their memory is this buffer's own."""

    def take(self) -> Tensor:
        """Hand the buffer over in the dtype of the reduction, zeros where no gradient came; the taker calls `returned` once it
        is done with it."""
        flat = self._allocate()
        for index, view in enumerate(self._views):
            if index not in self._filled:
                view.zero_()
        flat = self._convert(flat, self._dtypes.reduce)
        self._forget()
        return flat

    def returned(self, flat: Tensor) -> None:
        """Free a buffer that was taken. Nobody may use it after this."""
        self._gauge.remove(flat.nbytes)
        self._pool.give(flat.untyped_storage())

    def clear(self) -> None:
        """Drop whatever was collected."""
        flat = self._flat
        self._forget()
        if flat is not None:
            self.returned(flat)

    def _allocate(self) -> Tensor:
        return self._make(self._dtypes.collect) if self._flat is None else self._flat

    def _convert(self, flat: Tensor, dtype: torch.dtype) -> Tensor:
        """The buffer, exchanged for one of another dtype with the same content."""
        if flat.dtype == dtype:
            return flat
        converted = self._make(dtype).copy_(flat)
        self.returned(flat)
        return converted

    def _make(self, dtype: torch.dtype) -> Tensor:
        memory = self._pool.take(self._layout.numel * dtype.itemsize, self._device)
        self._flat = torch.empty(0, dtype=dtype, device=self._device).set_(memory, 0, (self._layout.numel,), (1,))
        self._views = self._layout.views(self._flat)
        self._gauge.add(self._flat.nbytes)
        return self._flat

    def _forget(self) -> None:
        self._flat = None
        self._views = []
        self._filled = set()
