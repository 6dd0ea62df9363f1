"""Random programs of collectives, on the world and on its groups at once, against plain torch."""

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardnet.backend import Backend
from tests.contract.programs import DTYPES, GROUPS, OPS, Runner, Step, reductions


@st.composite
def steps(draw: st.DrawFn) -> Step:
    members = draw(st.sampled_from(GROUPS))
    ranks = len(members)
    dtype = draw(st.sampled_from(DTYPES))
    return Step(
        members,
        draw(st.sampled_from(OPS)),
        dtype,
        draw(st.one_of(st.integers(0, 10), st.integers(0, 70))),
        draw(st.integers(1, 3)),
        draw(st.sampled_from(reductions(dtype))),
        draw(st.integers(0, ranks - 1)),
        tuple(tuple(draw(st.lists(st.integers(0, 12), min_size=ranks, max_size=ranks))) for _ in range(ranks)),
    )


@pytest.mark.parametrize("passing", [False, True])
def test_any_program(four: Sequence[Backend], passing: bool) -> None:
    runner = Runner(four, passing=passing)

    @settings(max_examples=20 if passing else 60, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(steps(), max_size=25), st.integers(0, 1000))
    def run(program: list[Step], seed: int) -> None:
        runner.run(program, seed)

    run()
