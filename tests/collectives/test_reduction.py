"""Element-wise arithmetic on raw arrays: the same results as torch's."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardnet.collectives.reduction import ReduceOp, Reduction, as_array, as_bytes, check_dtype, dtype_name
from shardnet.errors import DtypeError

HALVES = (torch.float16, torch.bfloat16)


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit float, NaNs included."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(dtype)


def reduce(op: ReduceOp, parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts reduced in order, as the collectives do it."""
    reduction = Reduction(op, parts[0].dtype, len(parts))
    total = reduction.sum(map(as_array, parts)).copy()
    out = torch.empty_like(parts[0])
    reduction.finish(total, as_array(out))
    return out


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_is_widened_exactly(dtype: torch.dtype) -> None:
    values = all_of(dtype)
    widened = torch.from_numpy(Reduction(ReduceOp.SUM, dtype, 2).widen(as_array(values)))
    assert widened.dtype == torch.float32
    assert torch.equal(widened.nan_to_num(7.0), values.float().nan_to_num(7.0))
    assert torch.equal(widened.isnan(), values.isnan())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_half_is_narrowed_back_to_itself(dtype: torch.dtype) -> None:
    values = all_of(dtype)
    reduction = Reduction(ReduceOp.SUM, dtype, 2)
    out = torch.empty_like(values)
    reduction.finish(reduction.widen(as_array(values)), as_array(out))
    assert torch.equal(out.isnan(), values.isnan())
    number = ~values.isnan()
    assert torch.equal(out.view(torch.int16)[number], values.view(torch.int16)[number])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_sums_are_rounded_once(dtype: torch.dtype, numbers: list[float]) -> None:
    """As torch rounds float32 to the dtype: to the nearest, ties to even."""
    wide = torch.tensor(numbers, dtype=torch.float32)
    reduction = Reduction(ReduceOp.SUM, dtype, 2)
    out = torch.empty(len(numbers), dtype=dtype)
    reduction.finish(wide.numpy().copy(), as_array(out))
    assert torch.equal(out.nan_to_num(7.0), wide.to(dtype).nan_to_num(7.0))


@pytest.mark.parametrize("op", [op for op in ReduceOp if op.is_defined_for(torch.float32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_floats_are_reduced_as_by_torch(op: ReduceOp, dtype: torch.dtype) -> None:
    parts = list(torch.randn(3, 1000, generator=torch.Generator().manual_seed(1), dtype=dtype))
    expected = {
        ReduceOp.SUM: parts[0] + parts[1] + parts[2],
        ReduceOp.MEAN: (parts[0] + parts[1] + parts[2]) / 3,
        ReduceOp.MIN: torch.minimum(torch.minimum(parts[0], parts[1]), parts[2]),
        ReduceOp.MAX: torch.maximum(torch.maximum(parts[0], parts[1]), parts[2]),
        ReduceOp.PRODUCT: parts[0] * parts[1] * parts[2],
    }[op]
    assert torch.equal(reduce(op, parts), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool], ids=str)
def test_bits_are_reduced_as_by_torch(dtype: torch.dtype) -> None:
    parts = [part.to(dtype) for part in torch.randint(0, 100, (3, 1000), generator=torch.Generator().manual_seed(1)) - 3]
    assert torch.equal(reduce(ReduceOp.BAND, parts), parts[0] & parts[1] & parts[2])
    assert torch.equal(reduce(ReduceOp.BOR, parts), parts[0] | parts[1] | parts[2])
    assert torch.equal(reduce(ReduceOp.BXOR, parts), parts[0] ^ parts[1] ^ parts[2])


def test_integers_wrap_and_booleans_saturate() -> None:
    """Integers as torch adds them; a sum of booleans says whether any was true, a minimum whether all were."""
    assert reduce(ReduceOp.SUM, [torch.tensor([200], dtype=torch.uint8), torch.tensor([100], dtype=torch.uint8)]).tolist() == [44]
    assert reduce(ReduceOp.SUM, [torch.tensor([2**63 - 1]), torch.tensor([1])]).tolist() == [-(2**63)]
    flags = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    assert reduce(ReduceOp.SUM, flags).tolist() == reduce(ReduceOp.MAX, flags).tolist() == [True, True, False]
    assert reduce(ReduceOp.MIN, flags).tolist() == [True, False, False]


def test_arithmetic_warns_of_nothing() -> None:
    """Infinities and overflow are the user's business. Numpy would warn about them, and warnings are errors here."""
    infinite = torch.tensor([torch.inf])
    assert reduce(ReduceOp.SUM, [infinite, -infinite]).isnan().all()
    assert reduce(ReduceOp.SUM, [torch.tensor([3e38]), torch.tensor([3e38])]).isinf().all()
    assert reduce(ReduceOp.SUM, [torch.tensor([60000.0]).half(), torch.tensor([60000.0]).half()]).isinf().all()


def test_arrays_are_the_tensors_own_memory() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        tensor = torch.zeros(2, 3, dtype=dtype)
        as_array(tensor)[:] = 1
        assert tensor.bool().all()
    scalar = torch.tensor(1.0)
    as_array(scalar)[0] = 5
    assert scalar.item() == 5
    assert as_array(torch.zeros(0, 3)).shape == (0,)
    assert bytes(as_bytes(np.array([1, 2], dtype=np.uint16))) == b"\x01\x00\x02\x00"
    assert len(as_bytes(np.zeros(0))) == 0


def test_dtypes() -> None:
    assert dtype_name(torch.bfloat16) == "bfloat16"
    for dtype in (torch.complex64, torch.uint16, torch.float8_e4m3fn):
        with pytest.raises(DtypeError, match="cannot be sent; supported: float64, float32, float16, bfloat16, int64"):
            check_dtype(dtype, None)
        with pytest.raises(DtypeError, match="cannot be reduced; supported: float64"):
            check_dtype(dtype, ReduceOp.SUM)
    with pytest.raises(DtypeError, match="mean of int32 is not defined"):
        check_dtype(torch.int32, ReduceOp.MEAN)
    check_dtype(torch.int32, ReduceOp.SUM)
    check_dtype(torch.int32, None)
