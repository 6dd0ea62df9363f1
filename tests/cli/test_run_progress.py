"""`shardnet run` shows the progress that a worker reports: a bar on a terminal, lines elsewhere."""

import os
import pty
import subprocess
import sys
import termios
import time
from pathlib import Path

from shardnet.cli.launch.progress import PLAIN_INTERVAL_S
from tests.cli.launched import Launched, script

# A worker that reports what a training program would, and ends when it is told to.
WORKER = """
import asyncio
from shardnet.config import Limits, Timeouts
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint

asked = asyncio.Event()
step = 0

def snapshot():
    global step
    step += 10
    if step == 30:
        asked.set()
    progress = stats_pb2.Progress(step=step, total_steps=100, loss=2.5, tokens_per_s=45200)
    steps = stats_pb2.Steps(seconds=10.0, exposed_s=1.2)
    return stats_pb2.SnapshotReply(role='worker', step=step, progress=progress, steps=steps, exposed_s=1.5)

async def main():
    async with Endpoint('127.0.0.1:0', limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=snapshot) as endpoint:
        with open(os.environ['SHARDNET_REPORT_FILE'], 'a') as report:
            report.write(f'{endpoint.address} 0 1\\n')
        await asked.wait()
        print('asked')

asyncio.run(main())
"""

HEIR = """
import asyncio
from shardnet.config import Limits, Timeouts
from shardnet.pb import stats_pb2
from shardnet.transport.endpoint import Endpoint

alive = os.open('fifo', os.O_RDONLY if rank else os.O_WRONLY)
asked = asyncio.Event()

def snapshot():
    if rank == 0:
        os._exit(1)
    asked.set()
    return stats_pb2.SnapshotReply(role='worker', step=1, progress=stats_pb2.Progress(step=1))

def report(endpoint, rank, world_size):
    with open(os.environ['SHARDNET_REPORT_FILE'], 'a') as report:
        report.write(f'{endpoint.address} {rank} {world_size}\\n')

async def main():
    async with Endpoint('127.0.0.1:0', limits=Limits(), timeouts=Timeouts.for_tests(), snapshot=snapshot) as endpoint:
        report(endpoint, rank, 2)
        await asyncio.to_thread(os.read, alive, 1) if rank else await asyncio.Event().wait()
        report(endpoint, 0, 1)
        await asked.wait()
        while True:
            print('asked')
            await asyncio.sleep(0.01)

asyncio.run(main())
"""


def test_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    started_s = time.monotonic()
    with Launched(tmp_path, "run", script(tmp_path, WORKER)) as run:
        result = run.finish()
    assert (result.status, result.out) == (0, "[0] asked\n")
    first, *others = result.err.splitlines()
    assert first == "shardnet: step 10/100, loss 2.500, 45.2k tokens/s, comm wait 12%"
    assert len(others) <= (time.monotonic() - started_s) / PLAIN_INTERVAL_S, "more than a line in this time"


def test_a_bar_at_the_bottom_of_a_terminal(tmp_path: Path) -> None:
    """stdout and stderr are one terminal: the bar is drawn, removed for every line, and gone at the end."""
    screen = on_a_terminal(tmp_path, "run", script(tmp_path, WORKER))
    assert " 10% |" in screen
    assert "| step 20/100, loss 2.500, 45.2k tokens/s, comm wait 12%, eta 0:" in screen
    line = next(line for line in screen.split("\r\n") if line.endswith("asked"))
    before, _, shown = line.rpartition("\r")
    assert shown == "\x1b[36m[0]\x1b[0m asked"
    assert before.endswith(" " * 20), "the bar was not cleared before the line"
    assert screen.rpartition("\r")[2] == "", "something is left in the bar's line"
    assert screen.rpartition("\r")[0].endswith(" " * 20), "the bar was not cleared at the end"


def test_another_worker_is_asked_when_the_first_has_died(tmp_path: Path) -> None:
    """Rank 0 dies when it is asked; rank 1 becomes rank 0, as its next report says, and the launcher calls it that."""
    os.mkfifo(tmp_path / "fifo")
    with Launched(tmp_path, "run", "--nproc", "2", "--min-workers", "1", script(tmp_path, HEIR), merged=True) as run:
        run.read_until("shardnet: rank 0 failed: exit code 1; the others go on\n")  # the other one may have been asked before that is seen
        run.read_until("[0] asked")


def on_a_terminal(directory: Path, *arguments: str) -> str:
    """Everything that the command writes to a terminal of 120 columns."""
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (30, 120))
        environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        command = [sys.executable, "-m", "shardnet.cli", *arguments]
        with subprocess.Popen(command, cwd=directory, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            theirs = -1
            screen = b"".join(iter(lambda: _read(ours), b""))
            assert process.wait() == 0
        return screen.decode()
    finally:
        os.close(ours)
        if theirs >= 0:
            os.close(theirs)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # EIO: the last writer has closed it
        return b""
