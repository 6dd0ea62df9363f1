"""The norm of gradients that are spread over ranks."""

import math
from collections.abc import Sequence

import torch

from shardnet.backend import ReduceOp
from shardnet.errors import UsageError
from shardnet.fsdp.communicators import Communicators

Tensor = torch.Tensor


def global_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device, comms: Communicators) -> Tensor:
    """The norm over all ranks' `gradients` as one vector: 0-dim float64, equal on all ranks. One all-reduce.

    Summed in float64, so that the result hardly depends on the number of ranks.
    """
    if not norm_type > 0:
        raise UsageError(f"norm_type must be positive, got {norm_type}")
    if math.isinf(norm_type):
        parts = [gradient.abs().max().double() for gradient in gradients if gradient.numel()]
        op, local = ReduceOp.MAX, torch.stack(parts).max() if parts else torch.zeros((), dtype=torch.float64, device=device)
    else:
        sums = [gradient.double().abs().pow(norm_type).sum() for gradient in gradients]
        op, local = ReduceOp.SUM, torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64, device=device)
    total = comms.wait(comms.gathers.all_reduce(local, op, label="gradient norm"), "gradient norm")
    return total if op is ReduceOp.MAX else total.pow(1 / norm_type)


def scale_to_norm(gradients: Sequence[Tensor], total: Tensor, max_norm: float) -> None:
    """Scale in place so that the global norm `total` becomes at most `max_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(coefficient.to(gradient.device, gradient.dtype))
