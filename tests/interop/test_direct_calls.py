"""Methods of a group, called as torch documents them."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery


@pytest.mark.parametrize(("program", "world_size"), [("forms", 3), ("facts", 2)])
def test_group(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    nursery.call("tests.interop.direct_calls:main", str(tmp_path), str(world_size), program, within_s=30.0)
