"""Checkpoints and state dicts of torch, where it asks a group for devices to put them together on."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery


@pytest.mark.parametrize("program", ["saved_in_the_background", "loaded_by_the_first_rank", "sharded_state_of_fsdp1"])
def test_states(nursery: Nursery, tmp_path: Path, program: str) -> None:
    nursery.call("tests.interop.checkpoints:main", str(tmp_path), "2", program, within_s=55.0)
