"""Ranks of one node as processes: what is left of a window when all are killed, and processes that cannot see each other."""

import re
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.launched import PATIENCE_S, Launched, script
from tests.training.workers import Nursery, Worker, begin, rendezvous

SHARED = Path("/dev/shm")
PROGRAM = """
import asyncio, torch, shardnet

async def main():
    async with shardnet.connect() as cluster:
        total = await cluster.backend.all_reduce(torch.ones(1_000_000))
        print('sum', total.sum().item(), 'shared with', sorted(cluster.telemetry.memory_peers))

asyncio.run(main())
"""
UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def names() -> set[str]:
    return {path.name for path in SHARED.iterdir()}


@pytest.mark.skipif(not SHARED.is_dir(), reason="this system has no /dev/shm")
def test_nothing_is_left_when_all_are_killed_at_once(nursery: Nursery) -> None:
    before = names()
    with rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(3)]
        begin(workers, job="doomed", work="stream", rows=100_000)
        for worker in workers:
            assert Path(f"/proc/{worker.pid}/maps").read_text().count("shardnet-window") >= 3  # its own and two views
            assert names() == before
        for worker in workers:
            worker.signal(signal.SIGKILL)
        assert [worker.end() for worker in workers] == [-signal.SIGKILL] * 3
    assert names() == before


def test_processes_that_do_not_see_each_other_talk_over_grpc(tmp_path: Path) -> None:
    """For example in two containers on one host that claim to be one node: their process numbers differ, but the network is the same."""
    if subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not make a process namespace")
    program, directory = script(tmp_path, PROGRAM), tmp_path / "run"
    directory.mkdir()
    with Launched(tmp_path, "rendezvous", "--listen", "127.0.0.1:0") as meeting:
        found = re.search(r"listening on (\S+);", meeting.read_until("listening on", ";"))
        assert found
        arguments = ("run", "--nnodes", "2", "--rendezvous", found[1], "--node", "one", program)
        apart = [*UNSHARE, sys.executable, "-m", "shardnet.cli", *arguments]
        with (
            subprocess.Popen(apart, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other,
            Launched(directory, *arguments) as run,
        ):
            here = run.finish()
            out, err = other.communicate(timeout=PATIENCE_S)
    assert here.status == other.returncode == 0, (here, out, err)
    for rank, (said, complained) in enumerate(sorted([(here.out, here.err), (out, err)])):
        assert said == f"[{rank}] sum 2000000.0 shared with []\n"
        assert f"not through shared memory: rank {1 - rank}: its process cannot be seen from here" in complained
