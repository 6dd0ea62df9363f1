"""Tensors that are read stay in the file's pages: the kernel has these in memory once, for all ranks of a node that read them."""

import json
from pathlib import Path

import pytest
import torch

from shardnet.checkpoint import open_weights, read_weights, write_weights
from shardnet.checkpoint.rank_file import RankFile, write_rank_file
from shardnet.errors import CheckpointError
from shardnet.state import Piece, Span

Tensor = torch.Tensor
NUMEL = 2**20
WHOLE = Span("weight", 0, NUMEL)


def mapped_file(tensor: Tensor) -> str:
    """The file whose pages hold this tensor; none for memory of this process alone."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, _, _, _, *name = line.split(maxsplit=5)
        first, end = (int(address, 16) for address in addresses.split("-"))
        if first <= tensor.data_ptr() < end:
            return "".join(name)
    raise AssertionError(f"{tensor.data_ptr():#x} is mapped nowhere")


def test_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_weights(path, {"weight": torch.arange(NUMEL), "bias": torch.ones(NUMEL)})
    for _, tensor in read_weights(path):
        assert mapped_file(tensor) == str(path)
        assert mapped_file(tensor.clone()) != str(path)


def test_weights_that_are_opened_are_read_one_by_one(tmp_path: Path) -> None:
    tensors = {"weight": torch.arange(NUMEL), "bias": torch.ones(3)}
    write_weights(tmp_path / "model.safetensors", tensors)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        opened = open_weights(path)
        assert dict(opened).keys() == tensors.keys()
        assert all(torch.equal(opened[name], tensors[name]) for name in tensors)
        assert mapped_file(opened["weight"]) == str(tmp_path / "model.safetensors")
    held = opened["weight"]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        opened["bias"]
    assert torch.equal(held, tensors["weight"])
    with pytest.raises(KeyError):
        opened["none"]


def test_weights_of_a_folder_may_be_in_several_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_weights(tmp_path / f"{name}.safetensors", {name: torch.full((2,), len(name))})
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in ("one", "two")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_weights(tmp_path)
    assert {name: value.tolist() for name, value in opened.items()} == {"one": [3, 3], "two": [3, 3]}


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}'])
def test_a_folder_without_weights_is_told(tmp_path: Path, index: str) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read: .*No such file"):
        open_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
        open_weights(tmp_path)


@pytest.mark.parametrize(("start", "stop"), [(0, NUMEL), (NUMEL // 4 + 1, NUMEL // 2)], ids=["all of a piece", "a part of it"])
def test_a_rank_of_a_checkpoint(tmp_path: Path, start: int, stop: int) -> None:
    values = torch.arange(NUMEL, dtype=torch.float32)
    entry = write_rank_file(tmp_path / "rank.safetensors", "id", [Piece(WHOLE, {"value": values})], {})
    read = RankFile(tmp_path, entry, "id").piece(WHOLE, start, stop).state["value"]
    assert torch.equal(read, values[start:stop])
    assert mapped_file(read) == str(tmp_path / "rank.safetensors")
