"""Real processes that are killed, frozen and replaced in the middle of a training."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.training.workers import Message, Nursery, Worker, rendezvous

NOTICED_WITHIN_S = 2.0  # about 0.05 s where nothing else runs
RESUMED_WITHIN_S = 10.0  # about 0.5 s
FROZEN_WITHIN_S = 8.0  # 1.5 x suspect_s, and time for a crowded machine


class Class:
    """Learners of one job, and what they have said."""

    def __init__(self, nursery: Nursery, address: str, stack: ExitStack, *, least: int, most: int) -> None:
        self.learners: list[Worker] = []
        self._nursery = nursery
        self._address = address
        self._stack = stack
        self._sizes = {"least": least, "most": most}

    def enrol(self, **command: object) -> Worker:
        learner = self._stack.enter_context(Worker(self._nursery, self._address))
        learner.tell(work="learn", job="class", **self._sizes, **command)
        self.learners.append(learner)
        return learner

    def resumed(self, world_size: int) -> Message:
        """Wait until all that are here have resumed in a world of this size, at the same bits; what the first one said."""
        said = [heard(learner, "resumed") for learner in self.learners]
        assert {each["world_size"] for each in said} == {world_size}, said
        assert len({(each["epoch"], each["step"], each["digest"]) for each in said}) == 1, said
        assert said[0]["committed"] in ("", said[0]["digest"]), "the state is not what was committed"
        return said[0]

    def end(self) -> None:
        """All stop at the same step, in peace."""
        self.learners[0].tell(stop=True)
        ends = [heard(learner, "left", skip="step") for learner in self.learners]
        assert [each["error"] for each in ends] == [None] * len(ends), ends
        assert [learner.end() for learner in self.learners] == [0] * len(ends)


def heard(learner: Worker, what: str, skip: str = "step") -> Message:
    return learner.hear(what, skip=skip)


@contextmanager
def lesson(nursery: Nursery, *, least: int, most: int) -> Iterator[Class]:
    with rendezvous() as address, ExitStack() as stack:
        yield Class(nursery, address, stack, least=least, most=most)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", ["forward", "backward", "commit", "committed"])
def test_a_killed_worker_costs_the_step_in_flight_and_its_replacement_comes_in(nursery: Nursery, place: str) -> None:
    with lesson(nursery, least=2, most=3) as learners:
        victim = learners.enrol(dies=place, at=2)
        for _ in range(2):
            learners.enrol()
        learners.resumed(3)
        died = heard(victim, "dies")
        learners.learners.remove(victim)
        assert victim.end() == -signal.SIGKILL
        for survivor in learners.learners:
            noticed = heard(survivor, "failed")
            assert noticed["at_s"] - died["at_s"] < NOTICED_WITHIN_S
        resumed = learners.resumed(2)
        assert resumed["step"] in (2, 3), "two were committed before, and a third one may have been"
        assert resumed["at_s"] - died["at_s"] < RESUMED_WITHIN_S
        learners.enrol()
        grown = learners.resumed(3)
        assert grown["step"] > resumed["step"]
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
            assert heard(survivor, "failed")["at_s"] - frozen_s < FROZEN_WITHIN_S
        left = learners.resumed(2)
        frozen.signal(signal.SIGCONT)
        heard(frozen, "failed")
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
            heard(learner, "step", skip="")
        for victim in learners.learners[2:]:
            victim.signal(signal.SIGKILL)
        learners.learners = learners.learners[:2]
        for survivor in learners.learners:
            heard(survivor, "failed")
        learners.resumed(2)
        learners.end()
