"""`Residual`: error feedback, what rounding took from gradients until the next ones are sent.

[Note: error feedback] e ← residual; send q = quantized(g + e); residual ← g + e - q. The sum of what was sent over any
number of steps then differs from the sum of the gradients by one residual, at most half a scale (Seide et al. 2014;
Karimireddy et al., https://arxiv.org/abs/1901.09847). An element that is not finite leaves no residual in its block, or it
would stay there for ever.
"""

import torch

from shardnet.fsdp.memory import Gauge

Tensor = torch.Tensor


class Residual:
    """What rounding took from what one rank sends of one group's gradients [n]; there from the first reduction on."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device, gauge: Gauge) -> None:
        self._dtype = dtype  # None: nothing is kept
        self._device = device
        self._gauge = gauge
        self._kept: Tensor | None = None

    @property
    def wanted(self) -> bool:
        return self._dtype is not None

    def make_room(self, numel: int) -> None:
        """Have memory for `numel` elements, if any are to be kept."""
        if self._kept is None and self._dtype is not None:
            self._kept = torch.zeros(numel, dtype=self._dtype, device=self._device)
            self._gauge.add(self._kept.nbytes)

    def add_to(self, gradients: Tensor) -> None:
        if self._kept is not None:
            gradients.add_(self._kept)

    def keep(self, errors: Tensor) -> None:
        """Replace it by `errors` [n]; NaN, of blocks that were not finite, counts as none."""
        if self._kept is not None:
            self._kept.copy_(errors).nan_to_num_(0.0, 0.0, 0.0)

    def clear(self) -> None:
        if self._kept is not None:
            self._gauge.remove(self._kept.nbytes)
            self._kept = None
