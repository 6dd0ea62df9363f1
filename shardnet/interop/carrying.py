"""Tensors in the form that a `Backend` takes: contiguous, of a dtype that it knows; and its results, put where they belong.

For collectives that only move data, a tensor of any dtype is sent as its bytes. For reductions a complex number is sent as two real ones,
if that gives the same result. A `Backend` has no mean of integers: the sum is divided here and truncated, as NCCL does it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardnet.backend import ReduceOp
from shardnet.errors import DtypeError, UsageError
from shardnet.interop.registration import DEVICES

Tensor = torch.Tensor

_OPS = (
    (dist.ReduceOp.SUM, ReduceOp.SUM),
    (dist.ReduceOp.AVG, ReduceOp.MEAN),
    (dist.ReduceOp.MIN, ReduceOp.MIN),
    (dist.ReduceOp.MAX, ReduceOp.MAX),
    (dist.ReduceOp.PRODUCT, ReduceOp.PRODUCT),
    (dist.ReduceOp.BAND, ReduceOp.BAND),
    (dist.ReduceOp.BOR, ReduceOp.BOR),
    (dist.ReduceOp.BXOR, ReduceOp.BXOR),
    (dist.ReduceOp.PREMUL_SUM, ReduceOp.SUM),
)
_LINEAR = (ReduceOp.SUM, ReduceOp.MEAN)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, slots=True)
class Reducing:
    """One of torch's operations, expressed by one of ours."""

    op: ReduceOp
    factor: float | Tensor | None = None  # by which each rank multiplies its part before
    cuts_mean: bool = False  # the result is a sum that must still be divided

    @property
    def label(self) -> str:
        """What ranks must agree on besides `op`."""
        return "truncated mean" if self.cuts_mean else ""

    def finish(self, target: Tensor, ranks: int, *, in_place: bool) -> Callable[[Tensor], None] | None:
        """What must still be done with the flat result, which is `target`'s own memory if it is `in_place`."""
        if self.cuts_mean:
            return partial(_put_mean, target, ranks, in_place)
        return None if in_place else partial(put, target)


def reduction(op: Any, dtype: torch.dtype) -> Reducing:
    """Translate torch's operation, a ReduceOp or its RedOpType."""
    for theirs, ours in _OPS:
        if op == theirs:  # not a lookup in a dict: equal operations of torch's have different hashes
            if ours is ReduceOp.MEAN and dtype in _WHOLE:
                return Reducing(ReduceOp.SUM, cuts_mean=True)
            return Reducing(ours, op.__getstate__()[1] if theirs == dist.ReduceOp.PREMUL_SUM else None)
    raise UsageError(f"the reduce operation must be one of {', '.join(theirs.name for theirs, _ in _OPS)}, got {op}")


def check(tensors: Sequence[Tensor]) -> None:
    """Raise UsageError for tensors that this backend cannot carry."""
    for tensor in tensors:
        if tensor.device.type not in DEVICES:
            raise UsageError(f"the backend 'shardnet' supports tensors on {' and '.join(DEVICES)}, got one on {tensor.device}")
        if tensor.is_quantized:  # torch itself crashes on a view of it as bytes
            raise UsageError(
                f"the backend 'shardnet' does not support quantized tensors, got {tensor.dtype}; use .int_repr() or .dequantize()"
            )
        if tensor.is_conj() or tensor.is_neg():  # torch has not computed its values yet
            raise UsageError(
                f"the backend 'shardnet' needs values in memory, got a lazy {'conjugate' if tensor.is_conj() else 'negative'} view; use "
                f".resolve_{'conj' if tensor.is_conj() else 'neg'}()"
            )
        if tensor.layout is not torch.strided:
            raise UsageError(
                f"the backend 'shardnet' supports dense tensors, and in all_reduce sparse_coo tensors, got layout {tensor.layout}; "
                "use .to_dense()"
            )


def movable(tensor: Tensor) -> Tensor:
    """A 1-D view of a contiguous tensor, as its bytes if a `Backend` does not know its dtype; a copy if it is not contiguous."""
    flat = _flat(tensor)
    return flat if flat.dtype in _KNOWN else _bytes(flat)


def reducible(tensor: Tensor, op: ReduceOp) -> Tensor:
    """A 1-D view of a contiguous tensor; a copy if it is not contiguous. Raises DtypeError."""
    flat = _flat(tensor)
    if not flat.is_complex():
        return flat
    if op not in _LINEAR:
        raise DtypeError(f"{op} of {tensor.dtype} is not defined: complex tensors can be reduced only to their sum or mean")
    return torch.view_as_real(flat).view(-1)


def premultiplied(tensor: Tensor, factor: float | Tensor | None) -> Tensor:
    """The tensor times the factor. Raises DtypeError if the product would have another dtype."""
    product = tensor if factor is None else tensor * factor
    if product.dtype != tensor.dtype:
        raise DtypeError(
            f"PREMUL_SUM of {tensor.dtype} with a factor of {product.dtype} is not defined; give a factor of the tensor's dtype"
        )
    return product


def put(target: Tensor, result: Tensor) -> None:
    """Copy a flat result, which may be bytes or pairs of real numbers, into a tensor of any strides.

    In an expanded dimension the tensor shows one element several times, and torch refuses to write it: the element gets the first of the
    values for it.
    """
    with writing(target):
        target, result = target.detach(), _like(result, target)
        for dim, stride in enumerate(target.stride()):
            if stride == 0 and target.shape[dim] > 1:
                target, result = target.narrow(dim, 0, 1), result.narrow(dim, 0, 1)
        target.copy_(result)


def writing(target: Tensor) -> AbstractContextManager[object]:
    """The mode for writing to a caller's tensor. torch allows writing to a tensor from inference mode only in that mode, which belongs to
    the caller's thread, and another thread may put the result in place."""
    return torch.inference_mode() if target.is_inference() else torch.no_grad()


def _put_mean(target: Tensor, ranks: int, in_place: bool, result: Tensor) -> None:
    with writing(result):
        mean = result.div_(ranks, rounding_mode="trunc")
    if not in_place:
        put(target, mean)


def put_all(targets: Sequence[Tensor], result: Tensor) -> None:
    start = 0
    for target in targets:
        count = target.numel() * target.itemsize // result.itemsize
        put(target, result[start : start + count])
        start += count


def _like(flat: Tensor, target: Tensor) -> Tensor:
    if flat.dtype != target.dtype:
        flat = flat.clone().view(torch.uint8).view(target.dtype)  # cloned: a slice of bytes may not be aligned for such elements
    return flat.view(target.shape)


def _flat(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().view(-1)
    # with fewer than two elements a tensor is contiguous whatever its stride, but torch refuses some strides for a view as bytes
    return flat if flat.stride() == (1,) else flat.as_strided(flat.shape, (1,))


def _bytes(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1).view(torch.uint8) if flat.is_complex() else flat.view(torch.uint8)


_KNOWN = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *_WHOLE,
    torch.bool,
)
