"""Groups whose ranks are not in ascending order, and groups of groups."""

from pathlib import Path

import pytest
import torch

from shardnet.backend import Pending
from shardnet.interop import reordered
from tests.training.workers import Nursery


def run(nursery: Nursery, folder: Path, program: str, world_size: int) -> None:
    nursery.call("tests.interop.orders:main", str(folder), str(world_size), program, within_s=55.0)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", ["as_with_gloo", "uneven", "inference", "meshes"])
def test_ranks_are_numbered_as_they_were_given(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    run(nursery, tmp_path, program, world_size)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", ["split", "pipeline"])
def test_groups_are_split(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    run(nursery, tmp_path, program, world_size)


def test_what_is_on_a_gpu_is_put_in_order_by_the_first_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not put in order again later, when it may hold something else."""
    monkeypatch.setattr(reordered, "is_on_gpu", lambda _: True)
    output = torch.zeros(2)
    came = torch.tensor([1.0, 2.0])
    pending = reordered._then(Pending.done_with(came, "all_gather"), came, lambda blocks: output.copy_(blocks.flip(0)))
    assert output.tolist() == [0.0, 0.0]
    assert pending.wait() is output
    assert output.tolist() == [2.0, 1.0]
    output.zero_()
    assert pending.wait() is output
    assert output.tolist() == [0.0, 0.0]
