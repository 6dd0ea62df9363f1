"""Groups that end while something is under way in them."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery


@pytest.mark.parametrize("program", ["unmatched", "sent_before"])
def test_a_world_ends(nursery: Nursery, tmp_path: Path, program: str) -> None:
    nursery.call("tests.interop.endings:main", str(tmp_path), "2", program, within_s=55.0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_group_ends_alone(nursery: Nursery, tmp_path: Path, world_size: int) -> None:
    nursery.call("tests.interop.endings:main", str(tmp_path), str(world_size), "one_is_aborted", within_s=55.0)
