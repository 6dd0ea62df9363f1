"""`Place`: a local rank of this machine and the worker that has it."""

from shardnet.cli.launch.console import Console
from shardnet.cli.launch.environment import worker_environment
from shardnet.cli.launch.failure import Exit
from shardnet.cli.launch.job import Job
from shardnet.cli.launch.start import Start
from shardnet.cli.launch.worker import Worker


class Place:
    """A place's worker, and the workers that take over when it has died; lives as long as the launch."""

    def __init__(self, local_rank: int, job: Job, rendezvous: str, start: Start, console: Console) -> None:
        self._console = console
        self._start = start
        self._environment = worker_environment(job, local_rank, rendezvous)
        self._worker = Worker(local_rank, console, unique_here=job.nnodes == 1)
        self._taken = False

    @property
    def worker(self) -> Worker:
        """The latest worker. It may have ended."""
        return self._worker

    @property
    def label(self) -> str:
        return self._worker.label

    async def run(self) -> Exit:
        """Run a worker to its end, see Worker.run; each further call runs a new one."""
        environment = self._environment
        if self._taken:
            environment = {**environment, "SHARDNET_REPLACEMENT": "1"}
            # the others may have been renumbered meanwhile: its old rank may belong to another worker until it reports
            self._worker = Worker(self._worker.local_rank, self._console, unique_here=False)
            self._console.told.forget()
        self._taken = True
        return await self._worker.run(self._start, environment)

    def signal(self, number: int) -> None:
        self._worker.signal(number)

    def kill(self) -> None:
        self._worker.kill()
