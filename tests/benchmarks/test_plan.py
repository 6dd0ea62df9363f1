"""What is measured, and how often."""

import pytest

from benchmarks.plan import Case, Op
from shardnet.config import KIB, MIB


@pytest.mark.parametrize(("size", "outstanding", "calls"), [(KIB, 1, 20), (MIB, 1, 20), (16 * MIB, 1, 4), (65 * MIB, 1, 1), (KIB, 8, 1)])
def test_a_run_of_what_is_not_large_is_several_calls(size: int, outstanding: int, calls: int) -> None:
    assert Case(Op.ALL_GATHER, size, repeats=3, outstanding=outstanding).calls == calls
