"""torch's profiler shows a program's collectives."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery


@pytest.mark.parametrize("program", ["plain", "ddp", "unfinished"])
def test_collectives_are_shown(nursery: Nursery, tmp_path: Path, program: str) -> None:
    nursery.call("tests.interop.profiles:main", str(tmp_path), "2", program, within_s=50.0)
