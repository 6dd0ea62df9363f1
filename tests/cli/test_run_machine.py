"""`shardnet run` on an unusual machine: things that it needs are closed, gone, full or killed."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from shardnet.cli.launch import forge
from tests.cli.launched import Launched, script, shardnet

COMMAND = [sys.executable, "-m", "shardnet.cli", "run"]
TRAINING = """
import torch, shardnet

async def main():
    async with shardnet.connect() as cluster:
        print('mean', await cluster.mean(1.0))

shardnet.run(main)
"""
WAITING = """
import signal, shardnet

async def main():
    async with shardnet.connect() as cluster:
        print('there', cluster.rank)
        signal.pause()

shardnet.run(main)
"""
ASKED = """
import asyncio, signal, shardnet

heard = []
signal.signal(signal.SIGUSR1, lambda *_: heard.append(True))

async def main():
    async with shardnet.connect() as cluster:
        print('there', cluster.rank)
        while not heard:
            await asyncio.sleep(0.01)

shardnet.run(main)
"""


def test_a_timeline_that_was_not_written_is_not_announced(tmp_path: Path) -> None:
    """Nor is one of the previous run."""
    program = script(tmp_path, TRAINING)
    trace = tmp_path / "folder" / "trace.json"
    first = shardnet(tmp_path, "run", "--trace", str(trace), program)
    assert f"timeline of all ranks, for https://ui.perfetto.dev: {trace}" in first.err
    old = trace.stat().st_mtime - 3600
    os.utime(trace, (old, old))
    without = script(tmp_path, TRAINING.replace("connect()", "connect(trace='')"))
    second = shardnet(tmp_path, "run", "--trace", str(trace), without)
    assert (second.status, second.err) == (0, "")


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_standard_streams_may_be_closed(tmp_path: Path, closed: tuple[int, ...]) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    program = script(tmp_path, TRAINING.replace("print(", f"open({str(marks)!r} + f'/{{cluster.rank}}', 'x').close(); print("))
    redirections = " ".join(f"{number}>&-" for number in closed)
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {redirections}', "bash", *COMMAND, "--nproc", "2", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in marks.iterdir()) == ["0", "1"]


def test_a_limit_on_files_that_may_be_raised_is_raised(tmp_path: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = script(tmp_path, "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))")
    done = limited(tmp_path, "-S", program)
    assert done.stdout == f"[0] ({min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536}, {hard})\n"


def test_one_that_may_not_is_named(tmp_path: Path) -> None:
    done = limited(tmp_path, "-SH", script(tmp_path, "import time; time.sleep(60)"), nproc=9)
    assert done.returncode == 1
    assert "Too many open files" in done.stderr
    assert done.stderr.endswith("; raise the limit on open files (ulimit -n)\n")


def limited(directory: Path, which: str, program: str, nproc: int = 1) -> "subprocess.CompletedProcess[str]":
    """A run that may have 64 files open."""
    return subprocess.run(
        ["bash", "-c", f'ulimit {which} -n 64; exec "$@"', "bash", *COMMAND, "--nproc", str(nproc), program],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["bash", "-c", 'rmdir "$PWD"; exec "$@"', "bash", *COMMAND, "-m", "program"],
        cwd=gone,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "shardnet run: the working directory, in which workers start, does not exist any more; change to another one\n",
    )


def test_a_report_that_reaches_nobody_ends_no_training(tmp_path: Path) -> None:
    """For example because there is no /proc."""
    lines = "import os\nos.environ['SHARDNET_REPORT_FILE'] = '/no/such/file'\n"
    result = shardnet(tmp_path, "run", "--nproc", "2", script(tmp_path, lines + TRAINING))
    assert result.status == 0
    assert "cannot report rank 1 to the launcher: /no/such/file: No such file or directory" in result.err
    assert result.out.count("mean 1.0") == 2


def test_what_kept_the_first_import_from_working_is_shown(tmp_path: Path) -> None:
    """torch reports it only once: a second import says only that it was imported before."""
    (tmp_path / "torch.py").write_text(
        "import builtins\n"
        "if hasattr(builtins, 'before'):\n    raise ImportError('once only')\n"
        "builtins.before = True\nraise ImportError('a library is damaged')\n"
    )
    (tmp_path / "program.py").write_text("import torch")
    result = shardnet(tmp_path, "run", "--start-method", "forkserver", "program.py")
    assert result.status == 1
    assert "ImportError: a library is damaged\n" in result.err
    assert "ImportError: once only\n" in result.err
    assert result.err.index("a library is damaged") < result.err.index("once only")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are not forked")
class TestTheForkServer:
    """The process that forks workers."""

    @staticmethod
    def server(run: Launched) -> psutil.Process:
        (found,) = (each for each in psutil.Process(run.process.pid).children() if forge.__file__ in each.cmdline())
        return found

    @pytest.mark.parametrize("elastic", [(), ("--min-workers", "1", "--restarts", "2")])
    def test_its_end_is_told_as_such(self, tmp_path: Path, elastic: tuple[str, ...]) -> None:
        with Launched(tmp_path, "run", "--nproc", "2", "--start-method", "forkserver", *elastic, script(tmp_path, WAITING)) as run:
            run.read_until("there 0", "there 1")
            server = self.server(run)
            server.send_signal(signal.SIGKILL)
            result = run.finish()
        assert result.status == 1
        assert result.err.endswith(
            f"the fork server (pid {server.pid}) was killed by SIGKILL (the system does this when memory runs out), "
            "and all workers with it; '--start-method spawn' does without it\n"
        )
        assert "failed" not in result.err

    def test_a_signal_that_asks_a_worker_what_it_does_is_not_for_it(self, tmp_path: Path) -> None:
        with Launched(tmp_path, "run", "--nproc", "2", "--start-method", "forkserver", script(tmp_path, ASKED)) as run:
            run.read_until("there 0", "there 1")
            server = self.server(run)
            for each in (server, *server.children()):
                each.send_signal(signal.SIGUSR1)
            assert run.finish().status == 0
