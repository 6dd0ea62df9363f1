"""What is read lies in the file: the kernel has its pages in memory once, for as many ranks of a node as read them."""

from pathlib import Path

import pytest
import torch

from shardnet.checkpoint import read_weights, write_weights
from shardnet.checkpoint.rank_file import RankFile, write_rank_file
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


@pytest.mark.parametrize(("start", "stop"), [(0, NUMEL), (NUMEL // 4 + 1, NUMEL // 2)], ids=["all of a piece", "a part of it"])
def test_a_rank_of_a_checkpoint(tmp_path: Path, start: int, stop: int) -> None:
    values = torch.arange(NUMEL, dtype=torch.float32)
    entry = write_rank_file(tmp_path / "rank.safetensors", "id", [Piece(WHOLE, {"value": values})], {})
    read = RankFile(tmp_path, entry, "id").piece(WHOLE, start, stop).state["value"]
    assert torch.equal(read, values[start:stop])
    assert mapped_file(read) == str(tmp_path / "rank.safetensors")
