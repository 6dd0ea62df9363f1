"""FSDP2 over shardnet goes on after a collective has failed, and after a rank has died."""

from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from tests.training.workers import Nursery


def run(nursery: Nursery, folder: Path, program: str, world_size: int) -> None:
    nursery.call("tests.interop.recoveries:main", str(folder), str(world_size), program, within_s=55.0)


@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="this torch's FSDP2 cannot forget an iteration")
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("program", ["stray_in_forward", "stray_in_backward", "late_in_forward", "alone_in_giving_up"])
def test_a_step_that_failed_is_repeated(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    run(nursery, tmp_path, program, world_size)


def test_survivors_go_on_from_what_they_kept(nursery: Nursery, tmp_path: Path) -> None:
    run(nursery, tmp_path, "goes_on_without_one", 3)
