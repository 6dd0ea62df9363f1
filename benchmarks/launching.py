"""Running a session in worker processes, by shardnet's own launcher: of this machine, or of nodes that are namespaces on it."""

import asyncio
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from benchmarks.journal import Alone, Journal
from benchmarks.nodes import NodeFailed, run_on_nodes
from benchmarks.plan import Memory, Session, Topology, Transport, to_json
from benchmarks.row import Row
from benchmarks.tables import one_line
from benchmarks.targets import FSDP2, OURS
from shardnet.cli.launch.console import Console
from shardnet.cli.launch.job import DEFAULT_START_METHOD, Job, StartMethod
from shardnet.cli.launch.launcher import launch
from shardnet.cli.protection import Protection
from shardnet.cli.services import local_rendezvous
from shardnet.credentials import Role
from shardnet.credentials.token import new_token
from shardnet.observation.replies import read_stats
from shardnet.observation.views import Stats
from shardnet.pb import stats_pb2

T = TypeVar("T")


class SessionFailed(Exception):
    """A worker failed, which the launcher has reported, or the user stopped the run. `status` is the exit status that says which."""

    def __init__(self, status: int) -> None:
        super().__init__(f"the workers ended with status {status}")
        self.status = status


WORKER = "benchmarks.worker"


def run_session(session: Session) -> list[Row]:
    """Start the workers, show how far they are, return what they measured. No process is left when this returns or raises.

    Raises SessionFailed, and NamespacesUnavailable for a topology that this machine cannot have.
    """
    if isinstance(session, Memory) and not session.engine:
        return [_memory_row(session, *(_run(replace(session, engine=engine), Journal.alone) for engine in (OURS, FSDP2)))]
    return _run(session, Journal.rows)


def _run(session: Session, result: Callable[[Journal], T]) -> T:
    """Run the workers, and return what `result` reads from their journal."""
    with tempfile.TemporaryDirectory(prefix="shardnet-bench-") as name:
        directory = Path(name)
        journal = Journal(directory / Journal.FILE_NAME)
        run = _run_here if session.topology is Topology.ONE_NODE else _run_on_nodes
        status = run(session, directory, journal)
        if status != 0:
            raise SessionFailed(status)
        return result(journal)


def _memory_row(session: Memory, ours: Alone, theirs: Alone) -> Row:
    row = Row.compare(
        ours.timing,
        theirs.timing,
        moved_bytes=0,
        kind=session.kind,
        op="train_step",
        ranks=session.ranks,
        bytes=ours.parameter_bytes,
        peer=FSDP2,
        topology=str(session.topology),
        nodes=session.topology.nodes(session.ranks),
        transport=str(session.transport),
        chunk_bytes=session.chunk_bytes,
        layers=session.layers,
        ours_peak_bytes=ours.peak_bytes,
        peer_peak_bytes=theirs.peak_bytes,
        ours_loss=ours.loss,
        peer_loss=theirs.loss,
    )
    print(one_line(row), file=sys.stderr)
    return row


def _run_here(session: Session, directory: Path, journal: Journal) -> int:
    as_torchrun = isinstance(session, Memory) and session.engine == FSDP2
    job = Job(
        target=WORKER,
        is_module=True,
        arguments=(to_json(session), str(directory)),
        nproc=session.ranks,
        name=f"bench-{secrets.token_hex(4)}",
        protection=_protection(session),
        start_method=StartMethod.SPAWN if as_torchrun else DEFAULT_START_METHOD,
    )

    async def stats(_: str) -> Stats:
        return replace(read_stats(stats_pb2.SnapshotReply(role="worker")), progress=journal.last_progress())

    with Console() as console, _environment({"GLIBC_TUNABLES": ""} if as_torchrun else {}):  # malloc with its defaults
        return asyncio.run(launch(job, console, lambda: local_rendezvous(job.protection.security(Role.RENDEZVOUS)), stats))


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _protection(session: Session) -> Protection:
    """Plaintext in network namespaces, where there is nobody but the session itself: see nodes.py."""
    if session.transport is Transport.MTLS:
        return Protection(token=new_token())
    return Protection(insecure=session.topology is not Topology.ONE_NODE)


def _run_on_nodes(session: Session, directory: Path, _: Journal) -> int:
    """Run without a progress bar, since two launchers would draw two. Each row is still printed as a line."""
    nodes = session.topology.nodes(session.ranks)
    try:
        run_on_nodes(WORKER, (to_json(session), str(directory)), nodes, session.ranks // nodes, session.topology.rate, _protection(session))
    except NodeFailed as failure:
        return failure.status
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0
