"""`Residual`: error feedback. It keeps what rounding took from gradients until the next ones are sent.

[Note: error feedback] e ← residual; send q = quantized(g + e); residual ← g + e - q. The sum of what was sent over any
number of steps then differs from the sum of the gradients by one residual, at most half a scale (Seide et al. 2014;
Karimireddy et al., https://arxiv.org/abs/1901.09847). A block with an element that is not finite keeps no residual, since
a NaN would stay there for ever.
"""

from collections.abc import Sequence

import torch

from shardnet.fsdp.compressed.codec import Codec
from shardnet.fsdp.memory import Gauge

Tensor = torch.Tensor


class Residual:
    """What rounding took from what one rank sends of one group's gradients [n]; there from the first reduction on."""

    def __init__(self, dtype: torch.dtype | None, device: torch.device, gauge: Gauge) -> None:
        self._dtype = dtype  # None: nothing is kept
        self._device = device
        self._gauge = gauge
        self._kept: Tensor | None = None

    def make_room(self, numel: int) -> None:
        """Have memory for `numel` elements, if residuals are kept."""
        if self._kept is None and self._dtype is not None:
            self._kept = torch.zeros(numel, dtype=self._dtype, device=self._device)
            self._gauge.add(self._kept.nbytes)

    def pack(self, codec: Codec, gradients: Tensor, sizes: Sequence[int], packed: Tensor, packed_sizes: Sequence[int]) -> None:
        """Add the residual of earlier gradients to `gradients` [n], which are overwritten, and pack them part by part. Keep what
        rounding takes; NaN, in blocks that are not finite, counts as zero."""
        if self._kept is not None:
            gradients.add_(self._kept)
        for part, target in zip(gradients.split_with_sizes(list(sizes)), packed.split_with_sizes(list(packed_sizes)), strict=True):
            codec.pack(part, target)
            if self._kept is not None:
                part.sub_(codec.unpack(target, torch.empty_like(part)))
        if self._kept is not None:
            self._kept.copy_(gradients).nan_to_num_(0.0, 0.0, 0.0)

    def clear(self) -> None:
        if self._kept is not None:
            self._gauge.remove(self._kept.nbytes)
            self._kept = None
