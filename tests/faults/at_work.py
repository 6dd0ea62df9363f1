"""`at_work`: two workers that run collectives without pause and check all results."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from tests.rendezvous.process import rendezvous_process
from tests.training.workers import Nursery, Worker, begin

JOB = "test"


@dataclass
class Work:
    workers: list[Worker]  # by rank
    rendezvous: str
    server: "subprocess.Popen[str]"

    @property
    def processes(self) -> tuple[int, int]:
        """The process numbers of the first worker and of the rendezvous."""
        return self.workers[0].pid, self.server.pid


@contextmanager
def at_work(nursery: Nursery) -> Iterator[Work]:
    """Start them; check at the end that all have succeeded and have left nothing behind."""
    with ExitStack() as stack:
        server, address = stack.enter_context(rendezvous_process("127.0.0.1:0"))
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(2)]
        begin(workers, job=JOB, work="stream", seed=1, rows=100)
        for worker in workers:
            worker.hear("streaming")
        yield Work(sorted(workers, key=lambda worker: worker.rank), address, server)
        for worker in workers:
            worker.tell(stop=True)
        left = [worker.hear("left", skip="streaming") for worker in workers]
        assert [(each["error"], each["leaks"]) for each in left] == [(None, [])] * 2, left
        assert server.poll() is None
