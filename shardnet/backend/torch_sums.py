"""Sums of several ranks' parts as tensors, with the same bits on the CPU and on a GPU: see [Note: reduction order] in reduction.py."""

from collections.abc import Callable, Sequence

import torch

from shardnet.collectives.reduction import ReduceOp, Reduction, as_array, as_tensor

Tensor = torch.Tensor
_COMBINE: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MEAN: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def sum_dtype(reduction: Reduction) -> torch.dtype:
    """The dtype of an unfinished sum: 16-bit floats are widened."""
    return torch.float32 if reduction.widens else reduction.dtype


def combined(reduction: Reduction, parts: Sequence[Tensor]) -> Tensor:
    """Flat parts of all ranks, combined in the order given but not finished. With a single part the result may be that part itself."""
    if parts[0].device.type == "cpu":
        return as_tensor(reduction.sum([as_array(part) for part in parts]), sum_dtype(reduction))
    total = parts[0].to(sum_dtype(reduction))
    for part in parts[1:]:
        total = _COMBINE[reduction.op](total, part.to(sum_dtype(reduction)))
    return total


def finish(reduction: Reduction, total: Tensor, out: Tensor) -> None:
    """Divide it if it is a mean, round it to `out`'s dtype, and store it there."""
    if total.device.type == "cpu":
        reduction.finish(as_array(total), as_array(out))
        return
    if reduction.op is ReduceOp.MEAN:
        # divide by a tensor on that device: for a number, torch would multiply by its inverse, which rounds twice
        total = total / torch.full((), reduction.ranks, dtype=total.dtype, device=total.device)
    out.view(-1).copy_(total)
