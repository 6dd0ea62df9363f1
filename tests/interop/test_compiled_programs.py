"""torch.compile of programs over the process group: it leaves the group's own code alone and compiles the rest."""

from pathlib import Path

import pytest

from tests.training.workers import Nursery

PROGRAMS = ["ddp", "fsdp2", "whole_steps", "functional_collectives", "plain_collectives", "tensor_parallel"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled_programs_do_as_others(nursery: Nursery, tmp_path: Path, program: str) -> None:
    nursery.call("tests.interop.compiled:main", str(tmp_path), "2", program, within_s=50.0)


def test_in_a_group_of_two_backends(nursery: Nursery, tmp_path: Path) -> None:
    nursery.call("tests.interop.compiled:main", str(tmp_path), "2", "ddp", "BACKEND=cpu:shardnet,cuda:gloo", within_s=50.0)
