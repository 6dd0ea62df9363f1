"""Sums of sparse tensors, such as the gradient of an `nn.Embedding(sparse=True)`.

[Note: sparse sums] Each rank has different rows, and no rank knows how many the others have. So the ranks first tell each other their
numbers, and the call waits for that. Then indices and values are gathered, and each rank adds up the same values in the same order. The
amount of data grows with the number of ranks, as with gloo; this is worth while as long as few rows have values.
"""

from typing import Any

import torch

from shardnet.backend import Backend, Pending, ReduceOp
from shardnet.errors import CollectiveMismatch, UsageError
from shardnet.interop.carrying import Reducing, movable, premultiplied, writing
from shardnet.interop.work import Finish

Tensor = torch.Tensor


def sparse_all_reduce(backend: Backend, tensor: Tensor, how: Reducing, timeout_s: float) -> tuple[Pending[Any], Finish]:
    """Begin a sparse sum: returns the pending result, and the function that puts it into `tensor`.

    `tensor` has layout sparse_coo and the same shape on all ranks, otherwise this raises CollectiveMismatch. Floats of 16 bits are added up
    as float32. A collective that blocks until all ranks have called it, and raises a collective's errors.
    """
    if how.op not in (ReduceOp.SUM, ReduceOp.MEAN) or how.cuts_mean or tensor.is_complex():
        op = ReduceOp.MEAN if how.cuts_mean else how.op
        raise UsageError(f"sparse tensors can be reduced with SUM (real dtypes) or AVG (float dtypes) only, got {op} of {tensor.dtype}")
    own = tensor.detach()
    own = (own.float() if own.dtype in (torch.float16, torch.bfloat16) else own).coalesce()
    values, dims, label = premultiplied(own.values(), how.factor), own.sparse_dim(), f"a {how.op} of sparse tensors"
    counts, width = _counts(backend, own, timeout_s, label), values.shape[1:].numel()
    places = [count * dims for count in counts]
    indices = backend.all_gather(movable(own.indices()), sizes=places, timeout_s=timeout_s, label=label).quietly()
    pending = backend.all_gather(movable(values), sizes=[count * width for count in counts], timeout_s=timeout_s, label=label)

    def finish(gathered: Tensor) -> None:
        parts = [part.view(dims, count) for part, count in zip(torch.split(indices.wait(), places), counts, strict=True)]
        found = gathered.view(sum(counts), *values.shape[1:])
        total = torch.sparse_coo_tensor(torch.cat(parts, dim=1), found, own.shape, check_invariants=False).coalesce()
        with writing(tensor):
            tensor.copy_(total / len(counts) if how.op is ReduceOp.MEAN else total)

    return pending, finish


def _counts(backend: Backend, tensor: Tensor, timeout_s: float, label: str) -> list[int]:
    """The number of values of each rank."""
    own = torch.tensor([[tensor._nnz(), tensor.sparse_dim(), *tensor.shape]], device="cpu")
    (_, *shape), *_ = ranks = backend.all_gather(own, timeout_s=timeout_s, label=label).wait().tolist()
    for rank, (_, *other) in enumerate(ranks):
        if other != shape:
            raise CollectiveMismatch(
                f"{label}: rank 0 has a tensor of shape {shape[1:]} with {shape[0]} sparse dimensions, but rank {rank} has one of "
                f"shape {other[1:]} with {other[0]}; give all ranks the same"
            )
    return [count for count, *_ in ranks]
