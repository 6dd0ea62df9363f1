"""A part of torch's own tests of a process group; `make conformance` runs all of them."""

import sys
from pathlib import Path

import pytest

from tests.interop.sessions import run

PART = (
    "test_all_gather_coalesced",
    "test_dtensor_redistributes",
    "test_fully_shard_parity",
    "test_fsdp_nested_modules",
    "test_broadcast",
    "test_ddp_comm_hook_logging",
    "test_gather",
    "test_irecv",
    "test_send_recv_any_source",
)


def test_a_part(tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    command = [sys.executable, str(Path(__file__).with_name("conformance.py")), *PART]
    ended = run(command, tmp_path, 58.0)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(" passed ") > 10, ended.stdout
