"""Random programs of collectives, on the world and on its groups at once, against plain torch."""

import random
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardnet.backend import Backend
from shardnet.testing import same_bits
from tests.contract.programs import DTYPES, GROUPS, OPS, Step, expected, inputs_of, reductions, start

PATIENCE_S = 20.0


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


class Runner:
    """Four ranks and their groups, for many programs."""

    def __init__(self, ranks: Sequence[Backend]) -> None:
        self._groups = {(members, rank): ranks[rank].subgroup(members) for members in GROUPS for rank in members}

    def run(self, program: list[Step], seed: int) -> None:
        """Start all steps rank by rank, then wait for them in an order of its own."""
        data = [inputs_of(step, number) for number, step in enumerate(program)]
        started = []
        for rank in random.Random(seed).sample(range(4), 4):
            for number, step in enumerate(program):
                if rank in step.members:
                    local = step.members.index(rank)
                    handles = start(step, self._groups[step.members, rank], data[number][local])
                    started.append((number, local, handles))
        random.Random(seed).shuffle(started)
        for number, local, handles in started:
            results = [handle.wait(PATIENCE_S) for handle in handles]
            wanted = expected(program[number], data[number])[local]
            if wanted is not None:
                assert same_bits(results[-1], wanted), f"step {number} on rank {local} of {program[number].members}"


def test_any_program(four: Sequence[Backend]) -> None:
    runner = Runner(four)

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(steps(), max_size=25), st.integers(0, 1000))
    def run(program: list[Step], seed: int) -> None:
        runner.run(program, seed)

    run()
