"""What torch's handles say about operations under way."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery


@pytest.mark.parametrize("program", ["polled", "facts", "in_flight"])
def test_works(nursery: Nursery, tmp_path: Path, program: str) -> None:
    nursery.call("tests.interop.handles:main", str(tmp_path), "2", program, within_s=30.0)
