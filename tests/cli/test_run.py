"""`shardnet run`: environment, arguments, output, and how a run that goes well ends."""

import json
import os
import signal
import urllib.request
from pathlib import Path

import pytest

from shardnet.cli.launch.worker import STRAGGLER_S
from tests.cli.launched import Launched, has_ended, script, shardnet


def test_each_worker_learns_its_place(tmp_path: Path) -> None:
    program = script(tmp_path, "print(*(os.environ.get('SHARDNET_' + n) for n in ('LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'WORLD_SIZE', 'JOB')))")
    result = shardnet(tmp_path, "run", "--nproc", "3", "--job", "tuesday", program)
    assert result.status == 0
    assert sorted(result.out.splitlines()) == ["[0] 0 3 3 tuesday", "[1] 1 3 3 tuesday", "[2] 2 3 3 tuesday"]
    assert result.err == ""


def test_workers_of_several_nodes_share_job_and_world_and_are_called_local_until_ranked(tmp_path: Path) -> None:
    text = """
print(*(os.environ.get('SHARDNET_' + n) for n in ('RENDEZVOUS', 'WORLD_SIZE', 'JOB', 'NODE', 'LISTEN', 'INSECURE')))
with open(os.environ['SHARDNET_REPORT_FILE'], 'a') as report:
    report.write('10.0.0.2:7001 5 6\\n')
"""
    program = script(tmp_path, text)
    options = ("--nproc", "2", "--nnodes", "3", "--rendezvous", "10.0.0.1:7000", "--node", "n2", "--listen", "10.0.0.2", "--insecure")
    result = shardnet(tmp_path, "run", *options, program)
    assert "[local 0] 10.0.0.1:7000 6 default n2 10.0.0.2 1" in result.out


def test_a_worker_is_called_by_its_rank_once_it_has_reported(tmp_path: Path) -> None:
    text = """
print('before')
with open(os.environ['SHARDNET_REPORT_FILE'], 'a') as report:
    report.write('127.0.0.1:1 3 4\\n')
while True:
    print('after')
    signal.sigtimedwait([], 0.01)
"""
    program = script(tmp_path, text)
    with Launched(tmp_path, "run", "--nnodes", "2", "--rendezvous", "127.0.0.1:1", program) as run:
        output = run.read_until("[3] after")
        assert output.startswith("[local 0] before\n")


def test_arguments_reach_the_script_untouched(tmp_path: Path) -> None:
    result = shardnet(tmp_path, "run", script(tmp_path, "print(sys.argv[1:])"), "--", "-h", "--nproc", "9", "--", "b c", "")
    assert result.out == f"[0] {['-h', '--nproc', '9', '--', 'b c', '']}\n"


def test_a_run_has_a_page_while_it_runs(tmp_path: Path) -> None:
    program = script(tmp_path, "print('here', flush=True)\nsignal.pause()")
    with Launched(tmp_path, "run", "--web", "127.0.0.1:0", program, merged=True) as run:
        seen = run.read_until("page at http://127.0.0.1:", "[0] here")
        (line,) = [line for line in seen.splitlines() if "page at" in line]
        assert line.startswith("shardnet: page at http://127.0.0.1:")
        with urllib.request.urlopen(f"{line.split()[-1]}view.json", timeout=10) as view:
            assert json.load(view)["version"] == 1
        run.process.send_signal(signal.SIGTERM)
        assert run.finish().status == 128 + signal.SIGTERM


def test_a_module_is_run_by_name(tmp_path: Path) -> None:
    script(tmp_path, "print(__name__, sys.argv[1:])", name="program.py")
    result = shardnet(tmp_path, "run", "-m", "program", "--x")
    assert result.out == "[0] __main__ ['--x']\n"


def test_nothing_of_ten_thousand_lines_is_lost_when_workers_end_at_once(tmp_path: Path) -> None:
    text = """
for i in range(10_000):
    os.write(1 + i % 2, f'{i}\\n'.encode())
os.write(1, b'no end')
os._exit(0)
"""
    result = shardnet(tmp_path, "run", "--nproc", "2", script(tmp_path, text))
    for rank in (0, 1):
        assert _lines_of(rank, result.out) == [str(i) for i in range(0, 10_000, 2)] + ["no end"]
        assert _lines_of(rank, result.err) == [str(i) for i in range(1, 10_000, 2)]


def test_nothing_is_lost_when_the_reader_is_slower_than_the_workers_end(tmp_path: Path) -> None:
    """The worker has ended, its output waits in pipes and buffers, and nobody reads for longer than the launcher waits for a daemon.

    100 kB: more than a pipe of 64 KiB holds, and less than the launcher buffers, for pipes have 8 KiB for a user who has many.
    """
    text = """
alive = os.open('fifo', os.O_WRONLY)
for i in range(1000):
    os.write(1, b'x' * 99 + b'\\n')
"""
    os.mkfifo(tmp_path / "fifo")
    with Launched(tmp_path, "run", script(tmp_path, text)) as run:
        assert (tmp_path / "fifo").read_text() == "", "only the worker's end should end this"
        assert has_ended(run.process.pid, within_s=2 * STRAGGLER_S) is False, (
            "100 kB should not fit into the pipe: this test proved nothing"
        )
        result = run.finish()
    assert _lines_of(0, result.out) == ["x" * 99] * 1000


def test_bytes_that_are_no_text_and_lines_without_end_are_shown(tmp_path: Path) -> None:
    text = r"""
os.write(1, b'caf\xc3\xa9 \xff\r\n')
os.write(1, b'x' * 200_000)
"""
    result = shardnet(tmp_path, "run", script(tmp_path, text))
    lines = _lines_of(0, result.out)
    assert lines[0] == "café \\xff"
    assert "".join(lines[1:]) == "x" * 200_000


def test_what_a_worker_leaves_running_ends_with_it(tmp_path: Path) -> None:
    text = """
import subprocess
child = subprocess.Popen(['sleep', '1000'])
print('child', child.pid)
"""
    result = shardnet(tmp_path, "run", script(tmp_path, text))
    assert result.status == 0
    assert has_ended(int(result.out.split()[-1]))


@pytest.mark.parametrize("daemon", ["exec sleep 1000", "trap '' PIPE; while sleep 0.2; do echo still here; done"])
def test_a_daemon_that_keeps_the_output_open_does_not_hold_up_the_end(tmp_path: Path, daemon: str) -> None:
    text = f"""
import subprocess
child = subprocess.Popen(['sh', '-c', {daemon!r}], start_new_session=True)
print('child', child.pid, 'runs')
"""
    with Launched(tmp_path, "run", script(tmp_path, text)) as run:
        pid = int(run.read_until("child", "runs").split("child")[1].split()[0])
        try:
            assert run.finish().status == 0
            assert not has_ended(pid, within_s=0), "the daemon was meant to outlive the run: this test proved nothing"
        finally:
            os.kill(pid, signal.SIGKILL)


def test_no_reader_ends_the_run(tmp_path: Path) -> None:
    program = script(tmp_path, "while True: print('y' * 1000)")
    with Launched(tmp_path, "run", "--nproc", "2", program) as run:
        run.read_until("[0] y")
        assert run.process.stdout is not None
        run.process.stdout.close()
        assert run.process.wait(30) == 141
        assert "Traceback" not in run.err


def _lines_of(rank: int, output: str) -> list[str]:
    prefix = f"[{rank}] "
    return [line.removeprefix(prefix) for line in output.split("\n") if line.startswith(prefix)]
