"""What a group can carry."""

import pytest
import torch

from shardnet.errors import UsageError
from shardnet.interop.carrying import check


def test_sparse_tensors_are_refused_with_what_to_do() -> None:
    """But for all_reduce: sparse_sums.py."""
    layer = torch.nn.Embedding(4, 2, sparse=True)
    layer(torch.tensor([1])).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(UsageError, match=r"sparse_coo; use \.to_dense\(\)"):
        check([layer.weight.grad])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused_with_what_to_do() -> None:
    """Seen as bytes they are still quantized to torch, which crashes."""
    with pytest.raises(UsageError, match=r"moves no quantized tensors, got .*quint8; use \.int_repr\(\)"):
        check([torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)])
