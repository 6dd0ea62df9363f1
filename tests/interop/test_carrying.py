"""What a group can carry."""

import pytest
import torch
import torch.distributed as dist

from shardnet.errors import DtypeError, UsageError
from shardnet.interop.carrying import check, movable, premultiplied, put, reducible, reduction


def test_sparse_tensors_are_refused_with_what_to_do() -> None:
    """Except by all_reduce: see sparse_sums.py."""
    layer = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(UsageError, match=r"sparse_coo; use \.to_dense\(\)"):
        check([layer.weight.grad])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused_with_what_to_do() -> None:
    """To torch they are still quantized when they are viewed as bytes, and it crashes."""
    with pytest.raises(UsageError, match=r"does not support quantized tensors, got .*quint8; use \.int_repr\(\)"):
        check([torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)])


@pytest.mark.parametrize(("tensor", "what"), [(torch.ones(2, dtype=torch.complex64).conj(), "conj"), (torch.ones(2) * 1j, "neg")])
def test_what_torch_has_yet_to_compute_is_refused_with_what_to_do(tensor: torch.Tensor, what: str) -> None:
    with pytest.raises(UsageError, match=rf"use \.resolve_{what}\(\)"):
        check([tensor.conj().imag if what == "neg" else tensor])


@pytest.mark.parametrize(("dtype", "factor"), [(torch.int32, 0.5), (torch.float16, torch.tensor([0.5, 2.0]))])
def test_a_factor_that_makes_another_dtype_is_refused(dtype: torch.dtype, factor: float | torch.Tensor) -> None:
    with pytest.raises(DtypeError, match=rf"PREMUL_SUM of {dtype} with a factor of torch\.float32"):
        premultiplied(torch.ones(2, dtype=dtype), factor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint32, torch.complex64])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_a_column_of_a_matrix_is_carried_whatever_its_rows(rows: int, dtype: torch.dtype) -> None:
    """With one row or none torch calls it contiguous."""
    column = torch.arange(3 * rows).view(rows, 3).to(dtype)[:, 1]
    assert movable(column).nbytes == column.nbytes
    back = torch.full_like(column, 7)
    put(back, movable(column))
    assert back.tolist() == column.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_column_of_a_matrix_is_summed_whatever_its_rows(rows: int) -> None:
    column = torch.full((rows, 3), 2 + 1j)[:, 1]
    assert reducible(column, reduction(dist.ReduceOp.SUM, column.dtype).op).tolist() == [2.0, 1.0] * rows


def test_a_tensor_of_inference_mode_is_written_outside_of_it() -> None:
    """The thread that puts a result in place is not always the caller's."""
    with torch.inference_mode():
        target = torch.zeros(3, dtype=torch.int64)
    put(target, torch.full((3,), 5))
    assert target.tolist() == [5] * 3
    mean = reduction(dist.ReduceOp.AVG, target.dtype).finish(target, 2, in_place=True)
    assert mean is not None
    mean(target)
    assert target.tolist() == [2] * 3
