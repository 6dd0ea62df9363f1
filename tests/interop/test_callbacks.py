"""A callback of a future may wait for another future, as DDP's gradient compression hooks do."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery


@pytest.mark.parametrize(("program", "world_size"), [("chained", 2), ("power_sgd", 3), ("quantized", 2)])
def test_callbacks(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    nursery.call("tests.interop.callbacks:main", str(tmp_path), str(world_size), program, within_s=30.0)
