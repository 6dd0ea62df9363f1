"""Silent ranks without a rendezvous: a frozen one is named soon; one whose interpreter is only held is waited for."""

from pathlib import Path

import pytest

from shardnet.credentials.token import new_token
from tests.training.workers import Nursery


@pytest.mark.parametrize(("program", "world_size"), [("frozen", 2), ("frozen", 3), ("held", 3)])
def test_silence(nursery: Nursery, tmp_path: Path, program: str, world_size: int) -> None:
    nursery.call("tests.interop.silences:main", str(tmp_path), str(world_size), program, within_s=55.0)


def test_a_frozen_rank_under_tls(nursery: Nursery, tmp_path: Path) -> None:
    nursery.call("tests.interop.silences:main", str(tmp_path), "3", "frozen", new_token(), within_s=55.0)
