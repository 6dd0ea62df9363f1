"""Files of tensors are what the safetensors library reads, and would have written."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardnet.checkpoint import tensor_file
from shardnet.checkpoint.tensor_file import write_tensors
from shardnet.errors import UsageError
from shardnet.testing import same_bits

SHAPES = [(), (0,), (3, 0), (1,), (5, 7), (1000, 1001)]


def test_every_dtype_and_shape_is_read_by_the_library(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        f"{dtype}/{shape}": torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)
        for dtype, shape in itertools.product(tensor_file._DTYPES, SHAPES)
    }
    write_tensors(tmp_path / "ours", tensors, {"an": 'index, with "quotes" and ü'})
    read = load_file(tmp_path / "ours")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert same_bits(read[name], tensor), name
    with safe_open(tmp_path / "ours", framework="pt") as file:
        assert file.metadata() == {"an": 'index, with "quotes" and ü'}


def test_the_data_lies_where_the_library_would_put_it(tmp_path: Path) -> None:
    """Wide elements first, each tensor at a multiple of its elements' width."""
    tensors = {
        "b": torch.ones(3, dtype=torch.bool),
        "a": torch.ones(5, dtype=torch.float16),
        "c": torch.arange(3.0),
        "d": torch.ones(1).double(),
    }
    head = write_tensors(tmp_path / "ours", tensors, {"k": "v"})
    save_file(tensors, tmp_path / "theirs", metadata={"k": "v"})
    ours, theirs = (tmp_path / "ours").read_bytes(), (tmp_path / "theirs").read_bytes()
    assert ours.startswith(head)
    assert len(head) % 8 == 0
    data_bytes = sum(tensor.nbytes for tensor in tensors.values())
    assert len(ours) == len(head) + data_bytes
    assert ours[-data_bytes:] == theirs[-data_bytes:]


def test_a_file_without_tensors(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {}, {})
    assert load_file(tmp_path / "file") == {}


def test_what_the_format_has_no_place_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"weight has dtype torch.complex128, which a safetensors file cannot hold"):
        write_tensors(tmp_path / "file", {"weight": torch.ones(2, dtype=torch.complex128)}, {})
    monkeypatch.setattr(tensor_file, "_MOST_HEADER_BYTES", 1000)
    with pytest.raises(UsageError, match=r"100 tensors are too many for one safetensors file"):
        write_tensors(tmp_path / "file", {str(number): torch.ones(1) for number in range(100)}, {})
    assert not (tmp_path / "file").exists()
