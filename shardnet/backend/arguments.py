"""Checks of the arguments of collectives, and the errors of ranks whose arguments differ."""

from collections.abc import Sequence
from math import inf, prod
from typing import SupportsIndex

import torch

from shardnet.backend.streams import is_on_gpu
from shardnet.collectives.exchange import Disagreement
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.operation import Operation
from shardnet.collectives.reduction import ReduceOp, as_array, check_dtype, dtype_name
from shardnet.errors import CollectiveMismatch, InvalidRankError, SizeMismatchError, UsageError

Tensor = torch.Tensor


def as_input(tensor: Tensor, op: ReduceOp | None = None) -> Tensor:
    """Check a tensor and return it as the collectives take it: detached, and contiguous (copied if it is not)."""
    _check_tensor(tensor, "tensor")
    if op is not None and not isinstance(op, ReduceOp):
        raise UsageError(f"`op` must be a ReduceOp of shardnet, such as ReduceOp.SUM, got {op!r}")
    check_dtype(tensor.dtype, op)
    return tensor.detach().contiguous()


def as_output(out: Tensor | None, like: Tensor, shape: Sequence[int] | None, name: str = "out") -> Tensor:
    """`out`, on whatever device it is, if it fits; if it is None, a new tensor with the dtype and device of `like`. `shape` is that of
    `like` unless given. `name` is what the caller calls `out`."""
    _check_tensor(like, "tensor" if out is not like else name)
    shape = like.shape if shape is None else shape
    if out is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    _check_tensor(out, name)
    check_dtype(out.dtype, None)
    if out.dtype != like.dtype:
        raise SizeMismatchError(dtype_name(like.dtype), dtype_name(out.dtype), f"as dtype of `{name}`")
    if out.numel() != prod(shape):
        raise SizeMismatchError(prod(shape), out.numel(), f"elements in `{name}`")
    if not out.is_contiguous():
        raise UsageError(f"`{name}` must be contiguous, got a tensor that is not; pass a contiguous tensor, and copy the result into yours")
    return out.detach()


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """The pieces, flattened and put end to end."""
    check_pieces(pieces)
    return torch.cat([piece.detach().reshape(-1) for piece in pieces])


def check_pieces(pieces: Sequence[Tensor]) -> None:
    """Raise UsageError unless the pieces can be treated as one tensor."""
    if not pieces:
        raise UsageError("pieces must hold at least one tensor, got none; where a rank has no data, pass an empty tensor")
    for piece in pieces:
        _check_tensor(piece, "piece")
    kinds = {(dtype_name(piece.dtype), str(piece.device)) for piece in pieces}
    if len(kinds) > 1:
        raise UsageError(f"pieces must have one dtype and be on one device, got {sorted(kinds)}")


def seconds(timeout_s: object) -> float:
    """A timeout, checked."""
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < inf:
        raise UsageError(f"`timeout_s` must be a finite number of seconds above 0, got {timeout_s!r}")
    return timeout_s


def check_rank(rank: object, world_size: int, what: str) -> None:
    """Raise UsageError unless `rank` is a rank of a group of `world_size`; `what` is what the call uses it for."""
    if not isinstance(rank, SupportsIndex):
        raise UsageError(f"a {what} must be a rank, from 0 to {world_size - 1}, got {rank!r}")
    if not 0 <= rank.__index__() < world_size:
        raise InvalidRankError(rank.__index__(), world_size, what)


def _check_tensor(tensor: object, name: str) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"`{name}` must be a torch.Tensor, got a value of type {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"`{name}` must be dense, got layout {tensor.layout}; send its indices and values as dense tensors, or use to_dense()"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"tensors must be on the CPU or on a CUDA device, got one on {tensor.device}")


def copy(source: Tensor, result: Tensor) -> Tensor:
    if source.data_ptr() == result.data_ptr():
        return result
    if is_on_gpu(source) or is_on_gpu(result):
        result.view(-1).copy_(source.view(-1))
    else:
        as_array(result)[...] = as_array(source)
    return result


def row_sizes(sizes: Sequence[int] | None, world_size: int, default: int, *, own: int | None = None) -> list[int]:
    """A rank-indexed list of rows, checked; the entry of the rank `own` must be `default`."""
    if sizes is None:
        return [default] * world_size
    if len(sizes) != world_size:
        raise SizeMismatchError(world_size, len(sizes), "entries in the list of sizes")
    if min(sizes) < 0:
        raise UsageError(f"sizes must not be negative, got {list(sizes)}")
    if own is not None and sizes[own] != default:
        raise SizeMismatchError(sizes[own], default, f"rows in the tensor of rank {own} (its entry in `sizes`)")
    return list(sizes)


def scattered_sizes(sizes: Sequence[int] | None, world_size: int, rows: int) -> list[int]:
    """How many of the rows each rank gets, checked."""
    if sizes is None and rows % world_size:
        raise SizeMismatchError(f"a multiple of {world_size}", rows, "rows to scatter (pass `sizes` for an uneven split)")
    shape = row_sizes(sizes, world_size, rows // world_size)
    if sum(shape) != rows:
        raise SizeMismatchError(sum(shape), rows, "rows to scatter (the sum of `sizes`)")
    return shape


def largest(bounds: Bounds) -> int:
    return max(end - start for start, end in bounds)


def disagree_send(tensor: Tensor) -> Disagreement:
    """The error of a send and a receive that differ, counted in elements."""

    def disagree(op: Operation, sender: int, receiver: int, sent: int, expected: int) -> SizeMismatchError:
        sender, receiver = op.group.members[sender], op.group.members[receiver]
        sends, receives = sent // tensor.itemsize, expected // tensor.itemsize
        message = (
            f"{op.group.board.where()} {op.name}: rank {sender} sends {sends} elements, but the tensor of rank {receiver} has "
            f"{receives}; give both tensors the same number of elements"
        )
        return SizeMismatchError(receives, sends, message=message)

    return disagree


def disagree_all_to_all(op: Operation, sender: int, receiver: int, sent: int, expected: int) -> CollectiveMismatch:
    sender, receiver = op.group.members[sender], op.group.members[receiver]
    return CollectiveMismatch(
        f"{op.group.board.where()} {op.name}: rank {sender} sends {sent} bytes to rank {receiver}, which expects {expected}; "
        "recv_sizes[i] on rank j must equal send_sizes[j] on rank i"
    )


def kind(tensor: Tensor, *, rows: bool = True) -> str:
    """The dtype and shape on which all ranks must agree; without the number of rows if that is given separately."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape if rows else tensor.shape[1:])}"
