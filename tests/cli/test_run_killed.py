"""Every process of a `shardnet run` is killed at the same time, while its ranks share memory: nothing of it is left on the machine.

No process has time to clean up then, and none is left that could: the kernel must do it all. test_run_start.py and test_run_signals.py
kill only one of them, and test what happens to the others.
"""

import os
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.cli.launched import Launched, has_ended, script
from tests.resources import SHARED_MEMORY, belongs_to_a_stranger

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks share no memory, and there is no /proc to look into")
RANKS = 3
KINDS = {f"/memfd:shardnet-{kind} (deleted)" for kind in ("window", "mailbox", "segment")}
# a round is always under way, and the next one begins before it has ended: so the kill always comes in the middle
PROGRAM = """
import itertools, torch, shardnet

def begin(backend):
    small, large = torch.ones(256), torch.ones(2 * 2**20)  # 1 KiB, in a letter; 8 MiB, which are lent
    return [backend.all_reduce(small), backend.all_reduce(large), backend.all_gather_on_node(large)]

async def main():
    async with shardnet.connect() as cluster:
        under_way = begin(cluster.backend)
        for number in itertools.count():
            following = begin(cluster.backend)
            for each in under_way:
                await each
            under_way = following
            if number == 3:
                print('working', len(cluster.telemetry.memory_peers))

shardnet.run(main)
"""


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_nothing_is_left_when_all_are_killed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    names = shared_names()
    arguments = ("run", "--nproc", str(RANKS), "--start-method", method, script(tmp_path, PROGRAM))
    with Launched(tmp_path, *arguments, new_session=True) as run:
        run.read_until(*(f"[{rank}] working {RANKS - 1}" for rank in range(RANKS)))
        launcher = psutil.Process(run.process.pid)
        pids = [each.pid for each in (launcher, *launcher.children(recursive=True))]
        assert started_with(temporary) == set(pids)
        memory = set[str]().union(*map(memory_of, pids))
        assert {kind.rpartition(" ")[0] for kind in memory} >= KINDS
        kill(pids)
        assert [pid for pid in pids if not has_ended(pid)] == []
    assert started_with(temporary) == set()
    assert {pid: held for pid in psutil.pids() if (held := memory_of(pid) & memory)} == {}
    assert [name for name in shared_names() - names if not belongs_to_a_stranger(name)] == []
    assert list(temporary.iterdir()) == []


def kill(pids: Iterable[int]) -> None:
    """Kill their process groups, which may have more members; those that were started last come first, before they end with the others."""
    groups = dict.fromkeys(os.getpgid(pid) for pid in reversed(list(pids)))
    assert os.getpgrp() not in groups, "the tests would kill themselves"
    for group in groups:
        with suppress(ProcessLookupError):  # it has ended with another one
            os.killpg(group, signal.SIGKILL)


def started_with(temporary: Path) -> set[int]:
    """Processes with this temporary directory, whichever process is their parent by now."""
    found = set()
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or this user may not look at it
            if f"TMPDIR={temporary}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def memory_of(pid: int) -> set[str]:
    """The memory without a name in the file system that a process has mapped or open: each by its name and inode."""
    found = set()
    with suppress(OSError):  # as above
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:" in line:
                *_, inode, name = line.split(maxsplit=5)
                found.add(f"{name} {inode}")
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if (name := os.readlink(link)).startswith("/memfd:"):  # noqa: PTH115 - a link to no path
                found.add(f"{name} {link.stat().st_ino}")
    return found


def shared_names() -> set[str]:
    return set(map(str, SHARED_MEMORY.iterdir()))
