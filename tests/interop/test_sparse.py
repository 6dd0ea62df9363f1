"""Sums of sparse tensors, and DDP with an embedding whose gradient is one."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery


@pytest.mark.parametrize("program", ["sums", "halves", "odd_shapes", "nothing", "groups", "wrong", "ddp"])
def test_sparse_tensors_are_added_up(nursery: Nursery, tmp_path: Path, program: str) -> None:
    nursery.call("tests.interop.sparse_sums:main", str(tmp_path), "3", program, within_s=50.0)
