"""Memory that ranks of a node share, and who else is on the machine: another user, or nobody but there is no memory."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from shardnet.loop import LoopThread
from shardnet.transport.observe import snapshot
from tests.faults.at_work import at_work
from tests.faults.ledger import scenario
from tests.training.workers import Nursery

SEED = 20_261_131
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user")

# Two ranks of one node, with what is small, what is copied, and what lies in common memory; prints with whom rank 0 shares.
WORK = """
import asyncio, resource, sys, torch
if limit := int(sys.argv[1]):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
from shardnet.testing import each_rank, local_cluster

async def main():
    async with local_cluster(2, lending=False) as ranks:
        for rows in (10, 3_000_000, 20_000_000):
            for total in await each_rank(ranks, lambda rank: rank.all_reduce(torch.full((rows,), rank.rank + 1.0))):
                assert torch.equal(total, torch.full((rows,), 3.0))
            for buffer in await each_rank(ranks, lambda rank: rank.all_gather_on_node(torch.full((rows,), float(rank.rank)))):
                assert buffer.tensor.sum() == rows
                buffer.release()
        print(sorted(ranks[0].telemetry.memory_peers), flush=True)

asyncio.run(main())
"""


def test_another_user_reads_nothing(nursery: Nursery) -> None:
    """Nor unlinks anything. The same look as the workers' own user finds their memory, so it is one that could."""
    with at_work(nursery) as work, scenario("another user looks for shared memory", SEED, kept=False) as figures:
        for worker in work.workers:
            stats = LoopThread.shared().run(snapshot(worker.address)).result(10.0)
            assert list(stats.memory_peers) == [1 - worker.rank]
        pids = [str(worker.pid) for worker in work.workers]
        with pytest.raises(AssertionError, match=r"ended with 1:\n.*/fd/\d+.*/mem 0x.*process_vm_readv"):
            nursery.call("tests.faults.intruder:as_myself", *pids, within_s=20.0)
        nursery.call("tests.faults.intruder:as_nobody", *pids, within_s=20.0)
        figures.repeats = 1


FULL = "head -c 4096 /dev/zero > /dev/shm/all"
TAKEN = """
for name in shardnet shardnet-window shardnet-segment shardnet-mailbox; do
    ln -s /etc/passwd /dev/shm/$name.link
    touch /dev/shm/$name && chown nobody /dev/shm/$name && chmod 400 /dev/shm/$name
done
"""


@pytest.mark.parametrize(
    ("before", "limit_bytes", "peers"),
    [(FULL, 0, "[1]"), (TAKEN, 0, "[1]"), ("", 2**20, "[]"), ("", 40 * 2**20, "[1]")],
    ids=["/dev/shm is full", "another user has taken the names", "no memory for a window", "no memory for a common buffer"],
)
def test_it_starts_nevertheless(before: str, limit_bytes: int, peers: str) -> None:
    """And its results are right; a signal (SIGBUS, SIGXFSZ) would end it."""
    command: Sequence[str] = [sys.executable, "-c", WORK, str(limit_bytes)]
    if before:
        if shutil.which("unshare") is None:
            pytest.skip("there is no 'unshare' to have a /dev/shm of one's own with (util-linux)")
        own = "mount -t tmpfs -o size=4096 none /dev/shm"
        command = ["unshare", "--mount", "sh", "-ec", f'{own}\n{before}\nexec "$@"', "sh", *command]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == peers
