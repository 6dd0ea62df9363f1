"""The correct result of each collective, in plain torch: tensors of all ranks in, tensors of all ranks out.

Sums are taken in rank order, 16-bit floats in float32. A backend may add in another fixed order, so compare floats
whose sums are exact (small whole numbers), or with a tolerance.
"""

from collections.abc import Sequence

import torch

from shardnet.collectives.reduction import ReduceOp

Tensor = torch.Tensor
_HALF = (torch.float16, torch.bfloat16)


def all_reduce(inputs: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM) -> list[Tensor]:
    """S on each rank → S on each rank."""
    dtype = inputs[0].dtype
    wide = [each.float() if dtype in _HALF else each for each in inputs]
    total = wide[0].clone()
    for each in wide[1:]:
        match op:
            case ReduceOp.MIN:
                total = torch.minimum(total, each)
            case ReduceOp.MAX:
                total = torch.maximum(total, each)
            case ReduceOp.PRODUCT:
                total = total & each if dtype is torch.bool else total * each
            case ReduceOp.BAND:
                total = total & each
            case ReduceOp.BOR:
                total = total | each
            case ReduceOp.BXOR:
                total = total ^ each
            case _:
                total = total | each if dtype is torch.bool else total + each
    if op is ReduceOp.MEAN:
        total = total / len(inputs)
    return [total.to(dtype) for _ in inputs]


def broadcast(inputs: Sequence[Tensor], root: int) -> list[Tensor]:
    return [inputs[root] for _ in inputs]


def all_gather(inputs: Sequence[Tensor]) -> list[Tensor]:
    """[d, …] on each rank, d its own → [sum of d, …] on each rank; 0-dim counts as [1]."""
    whole = torch.cat([each.reshape(1) if each.dim() == 0 else each for each in inputs])
    return [whole for _ in inputs]


def reduce_scatter(inputs: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, sizes: Sequence[int] | None = None) -> list[Tensor]:
    """[d, …] on each rank → [sizes[rank], …]; without sizes, [d / ranks, …]."""
    sizes = [len(inputs[0]) // len(inputs)] * len(inputs) if sizes is None else list(sizes)
    return list(torch.split(all_reduce(inputs, op)[0], sizes))


def all_to_all(inputs: Sequence[Tensor], sizes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
    """`sizes[i][j]` rows go from rank i to rank j; without sizes, every rank's input is cut evenly."""
    ranks = range(len(inputs))
    sizes = [[len(each) // len(inputs)] * len(inputs) for each in inputs] if sizes is None else sizes
    parts = [torch.split(each, list(cut)) for each, cut in zip(inputs, sizes, strict=True)]
    return [torch.cat([parts[source][target] for source in ranks]) for target in ranks]
