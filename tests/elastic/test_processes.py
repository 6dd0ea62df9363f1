"""Real processes that are killed, frozen and replaced in the middle of a training."""

import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.elastic.lessons import lesson
from tests.rendezvous.process import rendezvous_process
from tests.training.workers import Nursery

NOTICED_WITHIN_S = 2.0  # about 0.05 s where nothing else runs
RESUMED_WITHIN_S = 10.0  # about 0.5 s
FROZEN_WITHIN_S = 8.0  # 1.5 x suspect_s, and time for a busy machine


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["forward", "backward", "commit", "committed"])
def test_a_killed_worker_costs_the_step_in_flight_and_its_replacement_comes_in(nursery: Nursery, place: str) -> None:
    with lesson(nursery, least=2, most=3) as learners:
        victim = learners.enrol(dies=place, at=2)
        for _ in range(2):
            learners.enrol()
        learners.resumed(3)
        died = learners.hear(victim, "dies")
        learners.learners.remove(victim)
        assert victim.end() == -signal.SIGKILL
        for survivor in learners.learners:
            noticed = learners.hear(survivor, "failed")
            assert noticed["at_s"] - died["at_s"] < NOTICED_WITHIN_S
        resumed = learners.resumed(2)
        assert resumed["step"] in (2, 3), "two were committed before, and a third one may have been"
        assert resumed["at_s"] - died["at_s"] < RESUMED_WITHIN_S
        learners.enrol()
        assert learners.resumed(3)["step"] > resumed["step"]
        learners.end()


@pytest.mark.timeout(120)
def test_a_frozen_worker_is_left_behind_and_comes_back_when_it_thaws(nursery: Nursery) -> None:
    with lesson(nursery, least=2, most=3) as learners:
        for _ in range(3):
            learners.enrol(suspect_s=1.0)
        learners.resumed(3)
        frozen = learners.learners.pop()
        frozen_s = frozen.signal(signal.SIGSTOP)
        for survivor in learners.learners:
            assert learners.hear(survivor, "failed")["at_s"] - frozen_s < FROZEN_WITHIN_S
        left = learners.resumed(2)
        frozen.signal(signal.SIGCONT)
        learners.hear(frozen, "failed")
        learners.learners.append(frozen)
        back = learners.resumed(3)
        assert back["epoch"] > left["epoch"]
        assert back["step"] > left["step"], "it was left behind, and what it had in memory counts no more"
        learners.end()


@pytest.mark.timeout(120)
def test_a_whole_node_may_be_killed(nursery: Nursery) -> None:
    with lesson(nursery, least=2, most=4) as learners:
        for node in ("left", "left", "right", "right"):
            learners.enrol(node=node)
        learners.resumed(4)
        for learner in learners.learners:
            learners.hear(learner, "step")
        for victim in learners.learners[2:]:
            victim.signal(signal.SIGKILL)
        learners.learners = learners.learners[:2]
        for survivor in learners.learners:
            learners.hear(survivor, "failed")
        learners.resumed(2)
        learners.end()


@pytest.mark.timeout(120)
def test_a_rendezvous_that_dies_costs_no_step_and_is_needed_again_only_when_somebody_dies(nursery: Nursery, tmp_path: Path) -> None:
    state = tmp_path / "rendezvous.db"

    with ExitStack() as stack:
        first, address = stack.enter_context(rendezvous_process("127.0.0.1:0", state))
        learners = stack.enter_context(lesson(nursery, least=2, most=3, address=address))
        for _ in range(3):
            learners.enrol()
        before = learners.resumed(3)
        first.kill()
        first.wait()
        victim = learners.learners.pop()
        seen = {learner: [learners.hear(learner, "step")["step"] for _ in range(5)] for learner in learners.learners}
        assert all(steps == list(range(steps[0], steps[0] + 5)) for steps in seen.values()), "they go on without it"
        victim.signal(signal.SIGKILL)
        for survivor in learners.learners:
            learners.hear(survivor, "failed")
        _, same = stack.enter_context(rendezvous_process(address, state))
        assert same == address
        after = learners.resumed(2)
        assert after["epoch"] == before["epoch"] + 1
        assert after["step"] in (learners.committed, learners.committed + 1), "the last one may be said by nobody"
        learners.end()
