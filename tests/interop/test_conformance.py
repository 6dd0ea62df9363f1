"""A part of torch's own tests of a process group; `make conformance` runs all of them."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery

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


def test_a_part(nursery: Nursery, tmp_path: Path) -> None:
    pytest.importorskip("expecttest")
    said = nursery.call("tests.interop.conformance_forked:main", str(tmp_path), *PART, within_s=58.0)
    assert said.count(" passed ") > 10, said
