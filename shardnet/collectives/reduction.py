"""Element-wise reductions on raw bytes, in an order that never depends on timing.

[Note: reduction order] A sum of floats depends on its order, so only the size of the data, the ranks and their nodes fix
the order, never arrival or chunk size. 16-bit floats are widened to float32, summed there and rounded once at the
end: a 16-bit running sum stops growing at 256 (bfloat16) or 2048 (float16).

Work runs in numpy rather than torch where possible: torch would start a pool of threads for the loop thread, in addition to
the pool of the thread that computes. Both release the GIL.
"""

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import numpy as np
import torch

from shardnet.errors import DtypeError

Array = np.ndarray  # 1-D, elements of the tensor's dtype (bfloat16 as uint16 bits)
Buffer = bytes | bytearray | memoryview


class ReduceOp(StrEnum):
    """How elements of different ranks become one. MEAN is SUM, then divided by the number of ranks. BAND, BOR and BXOR are the bitwise
    and, or and exclusive or of integers and bools."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"

    def is_defined_for(self, dtype: torch.dtype) -> bool:
        match self:
            case ReduceOp.MEAN:
                return dtype.is_floating_point
            case ReduceOp.BAND | ReduceOp.BOR | ReduceOp.BXOR:
                return not dtype.is_floating_point
            case _:
                return True


_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}
_HALF = (torch.float16, torch.bfloat16)
_COMBINE: dict[ReduceOp, Callable[..., Array]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def check_dtype(dtype: torch.dtype, op: ReduceOp | None) -> None:
    """Raise DtypeError unless `op` (None: plain movement) is defined for `dtype`."""
    if dtype not in _NUMPY:
        done = "sent" if op is None else "reduced"
        raise DtypeError(f"{dtype_name(dtype)} tensors cannot be {done}; supported: {', '.join(map(dtype_name, _NUMPY))}")
    if op is not None and not op.is_defined_for(dtype):
        instead = "reduce with SUM, or convert to a float dtype first" if op is ReduceOp.MEAN else "it is for integers and bool"
        raise DtypeError(f"{op} of {dtype_name(dtype)} is not defined: {instead}")


def as_array(tensor: torch.Tensor) -> Array:
    """The tensor's own memory as a 1-D array. The tensor is a contiguous CPU tensor of a checked dtype."""
    flat = tensor.detach().view(-1) if tensor.dim() else tensor.detach().reshape(1)
    return (flat.view(torch.uint16) if flat.dtype is torch.bfloat16 else flat).numpy()


def as_tensor(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `as_array`: a tensor of `dtype` over the array's memory."""
    return torch.from_numpy(array).view(dtype)


def as_bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array (memoryview cannot cast an empty one)."""
    return array.data.cast("B") if array.size else memoryview(b"")


def copy_bytes(data: Buffer, target: Array) -> None:
    """Write received bytes over an array of the same size, while other threads run."""
    np.copyto(target.view(np.uint8), np.frombuffer(data, np.uint8))


class Reduction:
    """A reduce operation for one dtype and a number of ranks."""

    def __init__(self, op: ReduceOp, dtype: torch.dtype, ranks: int) -> None:
        self.op = op
        self.dtype = dtype
        self.ranks = ranks
        self.widens = dtype in _HALF  # see [Note: reduction order]
        self._stored = _NUMPY[dtype]
        self._summed = np.float32 if self.widens else self._stored
        self._combine = _COMBINE[op]

    def view(self, data: Buffer) -> Array:
        """Received bytes as an array, without a copy."""
        return np.frombuffer(data, dtype=self._stored)

    def view_sum(self, data: Buffer) -> Array:
        """The bytes of an unfinished sum as an array, without a copy."""
        return np.frombuffer(data, dtype=self._summed)

    @property
    def sum_dtype(self) -> "np.dtype[np.generic]":
        """The dtype of an unfinished sum."""
        return np.dtype(self._summed)

    def widen(self, values: Array) -> Array:
        """Values as they are summed: float32 for 16-bit floats (a copy), otherwise the array itself."""
        if self.dtype is torch.bfloat16:
            widened: Array = (values.astype(np.uint32) << 16).view(np.float32)
            return widened
        return values.astype(np.float32) if self.widens else values

    def sum(self, parts: Iterable[Array], *, before: Array | None = None, out: Array | None = None) -> Array:
        """Combine parts of several ranks in the order given, and then the sum `before` with the result. It is widened, as `before` is.

        Each part except the first may be gone when the next one is asked for. Floating-point warnings are off: inf − inf is the user's own
        NaN.
        """
        rest = iter(parts)
        total = self.widen(next(rest))
        with np.errstate(all="ignore"):
            for part in rest:
                total = out = self._combine(total, self.widen(part), out=out)
            return total if before is None else self._combine(before, total, out=out)

    def reduce(self, parts: Sequence[Array], out: Array) -> None:
        """Combine everyone's part as `sum` does, and store the result. `out` may be one of the parts."""
        self.reduce_in_turn([part.copy() if is_overwritten(place, part, out) else part for place, part in enumerate(parts)], out)

    def reduce_in_turn(self, parts: Iterable[Array], out: Array, *, before: Array | None = None) -> None:
        """Like `reduce`, for parts that come one after the other; none of them `is_overwritten`."""
        self.finish(self.sum(parts, before=before, out=None if self.widens else out), out)

    def finish(self, total: Array, out: Array) -> None:
        """Divide if it is a mean, narrow if it was widened, and store. `out` may be `total`."""
        if out is total and self.op is not ReduceOp.MEAN:
            return
        with np.errstate(all="ignore"):
            if self.op is ReduceOp.MEAN:
                total = np.divide(total, self.ranks, out=total if total.flags.writeable else None)
            if self.dtype is torch.bfloat16:
                narrowed = torch.from_numpy(np.ascontiguousarray(total)).to(torch.bfloat16)
                np.copyto(out, narrowed.view(torch.uint16).numpy())
            elif out is not total:
                np.copyto(out, total, casting="same_kind")


def is_overwritten(place: int, part: Array, out: Array) -> bool:
    """Whether a reduction into `out` overwrites the part at that place before it is read. Not the first two: the first step reads both
    and writes `out`."""
    return place > 1 and begin_together(part, out)


def begin_together(one: Array, other: Array) -> bool:
    """Whether both arrays begin at the same address."""
    return bool(one.__array_interface__["data"][0] == other.__array_interface__["data"][0])
