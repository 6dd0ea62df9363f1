"""What follows when a worker of an elastic job fails."""

import pytest

from shardnet.cli.launch.recovery import Pauses, Recovery
from tests.cli.launch.fake_place import LONG_S, ended


def recovery(restarts: int, least: int = 0, pauses: Pauses | None = None) -> tuple[Recovery, list[str]]:
    said: list[str] = []
    return Recovery(restarts, least, said.append, pauses), said


def test_who_dies_young_again_and_again_waits_longer_and_longer() -> None:
    plan, said = recovery(9)
    found = [plan.replace("a", ended("rank 0", 1, lived_s=0.1), 1) for _ in range(8)]
    assert found == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert said[1] == "rank 0 failed: exit code 1; restarting it in 0.5 s (2 of 9)"
    assert plan.replace("a", ended("rank 0", 1, lived_s=LONG_S), 1) == 0.0, "it had lived long: not one that dies of its start"


def test_each_place_has_its_own_pauses_and_all_share_the_restarts() -> None:
    plan, said = recovery(3)
    young = [plan.replace(place, ended(f"rank {place}", 1, lived_s=0.1), 1) for place in (0, 1, 0, 1)]
    assert young == [0.0, 0.0, 0.5, None]
    assert said[-1].endswith("(3 of 3)")


def test_nobody_is_started_who_would_wait_for_peers_that_have_left() -> None:
    plan, said = recovery(3, least=2)
    assert plan.replace("a", ended("rank 0", 1), 0) is None
    assert plan.replace("a", ended("rank 0", 1), 1) == 0.0
    assert len(said) == 1


@pytest.mark.parametrize(
    ("others", "done", "least", "goes_on", "said"),
    [
        (2, 0, 2, True, ["rank 0 failed: exit code 1; the others go on"]),
        (1, 0, 2, False, []),
        (1, 1, 2, True, ["rank 0 failed: exit code 1; the others go on"]),
        (0, 0, 0, True, []),
    ],
)
def test_the_others_go_on_as_long_as_enough_are_left(others: int, done: int, least: int, goes_on: bool, said: list[str]) -> None:
    plan, lines = recovery(0, least)
    assert plan.go_on(ended("rank 0", 1), others, done) is goes_on
    assert lines == said
