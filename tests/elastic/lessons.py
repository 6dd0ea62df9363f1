"""Learners in processes of their own (tests/elastic/learner.py), and their messages."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.training.workers import Message, Nursery, Worker, rendezvous


class Class:
    """Learners of one job."""

    def __init__(self, nursery: Nursery, address: str, stack: ExitStack, *, least: int, most: int) -> None:
        self.learners: list[Worker] = []
        self.committed = 0  # the last step that any learner has reported as committed
        self._nursery = nursery
        self._address = address
        self._stack = stack
        self._sizes = {"least": least, "most": most}

    def enrol(self, *, namespace: str = "", **command: object) -> Worker:
        learner = self._stack.enter_context(Worker(self._nursery, self._address, namespace))
        learner.tell(work="learn", job="class", **self._sizes, **command)
        self.learners.append(learner)
        return learner

    def hear(self, learner: Worker, what: str) -> Message:
        """A learner's next message of a kind; steps before it are noted and skipped."""
        while (message := learner.hear_any())["what"] == "step":
            self.committed = max(self.committed, message["step"])
            if what == "step":
                break
        assert message["what"] == what, message
        return message

    def let_pass(self, until_s: float) -> None:
        """Wait until that time, in which the learners go on: they would stop if nobody took in what they say."""
        while time.monotonic() < until_s:
            for learner in self.learners:
                learner.listen(min(until_s, time.monotonic() + 0.1))

    def all_hear(self, what: str) -> list[Message]:
        return [self.hear(learner, what) for learner in self.learners]

    def resumed(self, world_size: int) -> Message:
        """Wait until all learners have resumed in a world of this size, with the same bits; return the last one's message."""
        said = self.all_hear("resumed")
        assert {each["world_size"] for each in said} == {world_size}, said
        assert len({(each["epoch"], each["step"], each["digest"]) for each in said}) == 1, said
        assert said[0]["committed"] in ("", said[0]["digest"]), "the state is not what was committed"
        return max(said, key=lambda each: float(each["at_s"]))

    def end(self) -> None:
        """End the training: all stop at the same step, without errors."""
        self.learners[0].tell(stop=True)
        ends = self.all_hear("left")
        assert [each["error"] for each in ends] == [None] * len(ends), ends
        assert [learner.end() for learner in self.learners] == [0] * len(ends)


@contextmanager
def lesson(nursery: Nursery, *, least: int, most: int, address: str | None = None) -> Iterator[Class]:
    """A class that meets at its own rendezvous, or at the one with that address."""
    with ExitStack() as stack:
        where = address or stack.enter_context(rendezvous())
        yield Class(nursery, where, stack, least=least, most=most)
