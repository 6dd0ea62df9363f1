"""Running a session in worker processes of this machine, by shardnet's own launcher."""

import asyncio
import secrets
import tempfile
from pathlib import Path

from benchmarks.journal import Journal
from benchmarks.plan import Session, to_json
from benchmarks.row import Row
from shardnet.cli.launch.console import Console
from shardnet.cli.launch.job import Job
from shardnet.cli.launch.launcher import launch
from shardnet.cli.services import local_rendezvous
from shardnet.telemetry import Progress


class SessionFailed(Exception):
    """A worker failed, which the launcher has told, or the user stopped the run. `status` is the exit status that says so."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the workers ended with status {status}")
        self.status = status


def run_session(session: Session) -> list[Row]:
    """Start the workers, show how far they are, return what they measured. No process is left when this returns or raises."""
    with tempfile.TemporaryDirectory(prefix="shardnet-bench-") as name, Console() as console:
        directory = Path(name)
        journal = Journal(directory / Journal.FILE_NAME)
        job = Job(
            target="benchmarks.worker",
            is_module=True,
            arguments=(to_json(session), str(directory)),
            nproc=session.ranks,
            name=f"bench-{secrets.token_hex(4)}",
        )

        async def progress(_: str) -> Progress:
            return journal.last_progress()

        status = asyncio.run(launch(job, console, local_rendezvous, progress))
        if status != 0:
            raise SessionFailed(status)
        return journal.rows()
