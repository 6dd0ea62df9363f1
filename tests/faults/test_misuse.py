"""Wrong programs: a rank calls another collective than the others, or none. All ranks are told soon, go on, and the next call works."""

import random
from contextlib import ExitStack
from typing import Any

import pytest

from tests.faults.ledger import SEED, Scenario, scenario
from tests.faults.misuse import SKIPPED
from tests.promises import within_s
from tests.training.workers import Nursery, Worker, rendezvous

RANKS = 4
NODES = {"one node": "aaaa", "two nodes": "aabb", "a node each": "abcd"}  # by rank
SIZES = (8, 600_000)  # elements of 4 bytes: letters and eager chunks; loans, windows and rings
MISMATCH_S, LATE_S = within_s(1.0), within_s(0.5)
TIMEOUT_S = 0.7  # of the ranks that wait for one that skips a call
ROUNDS = 10


@pytest.mark.parametrize("place", NODES)
def test_a_wrong_program_is_told(nursery: Nursery, place: str) -> None:
    rng = random.Random(f"{SEED} {place}")
    figures = Scenario(place)
    _misuse(nursery, figures, place, [(rng.randrange(RANKS), elements) for elements in SIZES])
    _within_promises(figures)


@pytest.mark.faults
@pytest.mark.parametrize("place", NODES)
def test_wrong_programs_again_and_again(nursery: Nursery, place: str) -> None:
    rng = random.Random(SEED)
    runs = [(number % RANKS, elements + RANKS * rng.randrange(4)) for number in range(ROUNDS) for elements in SIZES]
    with scenario(f"wrong shape, dtype, op, order; a skipped call: {place}") as figures:
        _misuse(nursery, figures, place, runs)
        _within_promises(figures)


def _within_promises(figures: Scenario) -> None:
    assert len(figures.detected_s) >= RANKS * figures.repeats
    assert max(figures.detected_s) <= MISMATCH_S


def _misuse(nursery: Nursery, figures: Scenario, place: str, runs: list[tuple[int, int]]) -> None:
    """Each run has one rank that does wrong and its own number of elements; all runs are in the same processes."""
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(RANKS)]
        for worker, node in zip(workers, NODES[place], strict=True):
            worker.tell(
                job="misuse", world_size=RANKS, node=node, work="call", function="tests.faults.misuse:misuse", arguments=[runs, TIMEOUT_S]
            )
        for worker in workers:
            worker.hear("joined")
        left = {worker.rank: worker.hear("left", within_s=len(runs) * 10.0) for worker in workers}
        assert [(each["error"], each["leaks"]) for each in left.values()] == [(None, [])] * RANKS, left
        for cases in zip(*(left[rank]["result"] for rank in range(RANKS)), strict=True):
            _check(figures, cases)
            figures.repeats += 1
        assert [worker.end() for worker in workers] == [0] * RANKS


def _check(figures: Scenario, said: tuple[dict[str, Any], ...]) -> None:
    """Check what the ranks, in this order, have said about one case."""
    odd = said[0]["odd"]
    if said[0]["case"] == SKIPPED:
        assert all(each["error"] == "CollectiveTimeout" and f"missing rank {odd} (" in each["message"] for each in said), said
        others = [each for rank, each in enumerate(said) if rank != odd]
        first_s = min(each["called_s"] for each in others)  # the first timeout ends it for all, also for those that called later
        assert min(each["failed_s"] for each in others) - first_s >= TIMEOUT_S * 0.9
        waited_s = [each["failed_s"] - each["called_s"] for each in others]
        assert max(waited_s) <= TIMEOUT_S + LATE_S, waited_s
        figures.detected_s.append(said[odd]["failed_s"] - said[odd]["called_s"])  # the odd rank is told when it calls
        figures.detected_s += [each - TIMEOUT_S for each in waited_s]
    else:
        wrong, right = (said[rank]["called"] for rank in (odd, odd - 1))
        for each in said:
            assert each["error"] == "CollectiveMismatch", said
            assert f"rank {odd} is in {wrong}" in each["message"], each
            assert right in each["message"], each
        all_s = max(each["called_s"] for each in said)
        figures.detected_s += [each["failed_s"] - all_s for each in said]
    assert all(each["next"] for each in said), said
