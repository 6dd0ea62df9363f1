"""What one worker process measures, as one rank of a session."""

import asyncio
import datetime
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import shardnet
from benchmarks import collectives
from benchmarks.journal import Journal
from benchmarks.plan import Collectives, Interop, Memory, Session, Topology, Training, Transport
from benchmarks.row import Row
from benchmarks.tables import one_line

GLOO_TIMEOUT = datetime.timedelta(seconds=120)  # of one collective; gloo's default is half an hour
STORE = "store"  # file name in the shared directory


async def measure(session: Session, directory: Path) -> None:
    """Join the cluster, measure, leave. `directory` is shared by the ranks: gloo's meeting point and the journal."""
    torch.set_num_threads(1)  # for both sides: ranks that share cores must not fight for them with threads as well
    logging.getLogger("shardnet.credentials").setLevel(logging.ERROR)  # it warns about plaintext, but nobody else is in the namespaces
    limits = shardnet.Limits(chunk_bytes=session.chunk_bytes)
    apart = session.topology is Topology.ONE_NODE and session.transport is not Transport.SHM
    alone = {"node": f"rank {os.environ['SHARDNET_LOCAL_RANK']}"} if apart else {}
    async with shardnet.connect(limits=limits, **alone) as cluster:
        # In a separate thread, so that this loop is free to handle signals. The first signal closes the cluster, which ends the thread.
        await asyncio.to_thread(_measure, session, cluster.backend, directory)


def _measure(session: Session, backend: shardnet.Backend, directory: Path) -> None:
    journal = Journal(directory / Journal.FILE_NAME if backend.rank == 0 else Path(os.devnull))
    if isinstance(session, Interop):
        _measure_interop(session, backend, directory, journal)
        return
    with _gloo(directory / STORE, backend):
        if isinstance(session, Collectives):
            _measure_collectives(session, backend, journal)
        elif isinstance(session, Memory):
            _measure_memory(session, backend, journal)
        else:
            _measure_training(session, backend, journal)


def _measure_collectives(session: Collectives, backend: shardnet.Backend, journal: Journal) -> None:
    for done, row in enumerate(collectives.measure(session, backend), start=1):
        _publish(row, backend, journal)
        journal.progress(done, len(session.cases), f"{session.ranks} ranks")


def _measure_training(session: Training, backend: shardnet.Backend, journal: Journal) -> None:
    from benchmarks import training  # imports FSDP2, which takes a second that sessions of collectives need not wait for

    def on_step(done: int) -> None:
        journal.progress(done, session.steps, f"{session.ranks} ranks, training")

    for row in training.measure(session, backend, on_step):
        _publish(row, backend, journal)


def _measure_interop(session: Interop, backend: shardnet.Backend, directory: Path, journal: Journal) -> None:
    from benchmarks import interop  # as above

    def on_row() -> None:
        journal.progress(0, 0, f"{session.ranks} ranks, torch's own code")

    with interop.groups_of(directory / STORE, backend.rank, backend.world_size) as groups:
        for row in interop.measure(session, groups, on_row):
            _publish(row, backend, journal)


def _measure_memory(session: Memory, backend: shardnet.Backend, journal: Journal) -> None:
    from benchmarks import memory  # imports FSDP2, too

    journal.progress(0, session.steps, f"{session.ranks} ranks, {session.engine} alone")
    journal.add_alone(memory.measure(session, backend))


def _publish(row: Row, backend: shardnet.Backend, journal: Journal) -> None:
    journal.add(row)
    if backend.rank == 0:
        print(one_line(row), file=sys.stderr)  # stdout is for the tables at the end


@contextmanager
def _gloo(store: Path, backend: shardnet.Backend) -> Iterator[None]:
    """Torch's default process group with the same ranks as the cluster, over the loopback interface unless nodes.py has set another one."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=backend.rank, world_size=backend.world_size, timeout=GLOO_TIMEOUT)
    try:
        yield
    finally:
        dist.destroy_process_group()
