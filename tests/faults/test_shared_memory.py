"""Memory that ranks of a node share, when another user is on the machine, and when there is too little memory."""

import os
import sys

import pytest

from shardnet.loop import LoopThread
from shardnet.transport.observe import snapshot
from tests.faults.at_work import at_work
from tests.faults.ledger import scenario
from tests.faults.scarcity import FULL, TAKEN
from tests.training.workers import Nursery

SEED = 20_261_131
pytestmark = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user")


def test_another_user_reads_nothing(nursery: Nursery) -> None:
    """Nor does it unlink anything. The same search as the workers' own user finds their memory, so the search works."""
    with at_work(nursery) as work, scenario("another user looks for shared memory", SEED, kept=False) as figures:
        for worker in work.workers:
            stats = LoopThread.shared().run(snapshot(worker.address)).result(10.0)
            assert list(stats.memory_peers) == [1 - worker.rank]
        pids = [str(worker.pid) for worker in work.workers]
        with pytest.raises(AssertionError, match=r"ended with 1:\n.*/fd/\d+.*/mem 0x.*process_vm_readv"):
            nursery.call("tests.faults.intruder:as_myself", *pids, within_s=20.0)
        nursery.call("tests.faults.intruder:as_nobody", *pids, within_s=20.0)
        figures.repeats = 1


@pytest.mark.parametrize(
    ("shm", "limit_bytes", "peers"),
    [(FULL, 0, "[1]"), (TAKEN, 0, "[1]"), ("", 2**20, "[]"), ("", 40 * 2**20, "[1]")],
    ids=["/dev/shm is full", "another user has taken the names", "no memory for a window", "no memory for a common buffer"],
)
def test_it_starts_nevertheless(nursery: Nursery, shm: str, limit_bytes: int, peers: str) -> None:
    """Its results are right. Signals (SIGBUS, SIGXFSZ) would kill it."""
    printed = nursery.call("tests.faults.scarcity:work", shm, str(limit_bytes), within_s=50.0)
    assert printed.splitlines()[-1] == peers, printed
