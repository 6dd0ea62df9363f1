"""`Crew`: worker processes that meet in one job after another, to run functions of the tests on real ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from tests.training.workers import Nursery, Worker, rendezvous

SIZE = 4  # processes, and so the largest world
WITHIN_S = 120.0  # for one job: the first that makes an optimizer imports torch's compiler, in all processes at once


class Crew:
    """Lives as long as its processes; see `crew`."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = tuple(workers)
        self._numbers = count()

    def run(self, world_size: int, work: Callable[..., Any], *arguments: object, nodes: Sequence[str] = ("",) * SIZE) -> list[Any]:
        """`work(backend, *arguments)` on every rank; the results by rank. Each is on the node of that name, or on this machine.

        `work` is a function of a module; arguments and results travel as JSON.
        """
        members = self._workers[:world_size]
        job = f"job {next(self._numbers)}"
        function = f"{work.__module__}:{work.__qualname__}"
        for worker, node in zip(members, nodes, strict=False):
            worker.tell(job=job, world_size=world_size, node=node, work="call", function=function, arguments=arguments)
        for worker in members:
            worker.hear("joined")
        ends = [
            worker.hear("left", within_s=WITHIN_S) for worker in members
        ]  # wait for all, even if one has failed, so that nobody is left in the middle of a job
        said = zip(members, ends, strict=True)
        errors = [f"rank {worker.rank}: {end['error']}: {end['message']}" for worker, end in said if end["error"]]
        assert not errors, "\n".join(errors)  # show all: a rank that has lost a peer does not know why
        for worker, end in zip(members, ends, strict=True):
            assert end["leaks"] == [], f"rank {worker.rank}"
        return [end["result"] for _, end in sorted(zip(members, ends, strict=True), key=lambda pair: pair[0].rank)]


@contextmanager
def crew(nursery: Nursery, size: int = SIZE) -> Iterator[Crew]:
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(size)]
        yield Crew(workers)
        for worker in workers:
            assert worker.end() == 0
