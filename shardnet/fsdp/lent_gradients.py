"""`LentGradients`: the full-size gradients of one group where autograd has put them, for other ranks to read there."""

from collections.abc import Sequence

import torch

from shardnet.fsdp.memory import Gauge
from shardnet.sharding import FlatLayout

Tensor = torch.Tensor


class LentGradients:
    """In place of a `GradientBuffer` where a reduction reads pieces (`Backend.lends_pieces`): nothing is copied.

    For gradients that are reduced in the dtype in which they come, of 32 bits or more: those of several backward passes are added up in
    that dtype (`no_sync`).
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype, *, gauge: Gauge) -> None:
        self._layout = layout
        self._dtype = dtype
        self._gauge = gauge
        self._kept: dict[int, Tensor] = {}
        self._own: set[int] = set()  # indices of the kept gradients whose memory nobody else can hold

    @property
    def empty(self) -> bool:
        return not self._kept

    def add(self, index: int, gradient: Tensor) -> None:
        """Take over the gradient of the index-th parameter, in that parameter's shape, or add it to the one that is there already."""
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if index not in self._kept:
            self._keep(index, dense.contiguous())
        elif index in self._own:
            self._kept[index].add_(dense)
        else:
            self._kept[index] = self._kept[index] + dense
            self._own.add(index)

    def outlive_backward(self) -> None:
        """More will be added to the gradients later, so copy those whose memory may also be that of other gradients, or of what the caller
        gave to backward."""
        for index in self._kept.keys() - self._own:
            self._kept[index] = self._kept[index].clone()
        self._own = set(self._kept)

    def take(self) -> Sequence[Tensor]:
        """Hand them over in the order of the layout, zeros where no gradient came; the taker calls `returned` once it is done with them."""
        for index, spec in enumerate(self._layout.specs):
            if index not in self._kept:
                self._keep(index, torch.zeros(spec.shape, dtype=self._dtype, device="cpu"))
        taken = [self._kept[index] for index in range(len(self._kept))]
        self._forget()
        return taken

    def returned(self, taken: Sequence[Tensor]) -> None:
        """Stop counting their memory."""
        self._gauge.remove(sum(gradient.nbytes for gradient in taken))

    def clear(self) -> None:
        """Drop whatever was collected."""
        self.returned(list(self._kept.values()))
        self._forget()

    def _keep(self, index: int, gradient: Tensor) -> None:
        self._kept[index] = gradient
        self._gauge.add(gradient.nbytes)

    def _forget(self) -> None:
        self._kept = {}
        self._own = set()
