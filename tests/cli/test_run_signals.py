"""`shardnet run` when the user or the system wants it to end."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launched import Launched, has_ended, script

READY = ("[0] ready", "[1] ready")


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP, signal.SIGTERM)],
)
def test_the_first_signal_lets_workers_finish(tmp_path: Path, number: signal.Signals, passed_on: signal.Signals) -> None:
    # no signal.pause() here: it would miss a signal that comes after the interpreter has checked its flags and before the system call
    text = f"""
def drain(*_):
    print('drained')
    sys.exit(0)
signal.signal({int(passed_on)}, drain)
print('ready')
while True:
    signal.sigtimedwait([], 0.1)
"""
    with Launched(tmp_path, "run", "--nproc", "2", script(tmp_path, text)) as run:
        run.read_until(*READY)
        run.process.send_signal(number)
        result = run.finish()
    assert result.status == 128 + number
    assert {"[0] drained", "[1] drained"} <= set(result.out.splitlines())
    assert f"{number.name}: passed on" in result.err


@pytest.fixture
def hangups_ignored() -> Iterator[None]:
    """Ignore SIGHUP, as nohup does; children inherit that."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_a_hangup_that_is_ignored_stays_so(tmp_path: Path, hangups_ignored: None) -> None:
    with Launched(tmp_path, "run", "--nproc", "2", script(tmp_path, "print('ready')\nsignal.pause()")) as run:
        run.read_until(*READY)
        run.process.send_signal(signal.SIGHUP)
        run.process.send_signal(signal.SIGTERM)
        result = run.finish()
    assert result.status == 143
    assert "SIGTERM: passed on" in result.err
    assert "SIGHUP" not in result.err


def test_the_second_signal_kills(tmp_path: Path) -> None:
    text = """
signal.signal(signal.SIGINT, lambda *_: print('busy'))
print('ready', os.getpid())
while True:
    signal.sigtimedwait([], 0.1)
"""
    with Launched(tmp_path, "run", "--nproc", "2", script(tmp_path, text)) as run:
        run.read_until(*READY)
        run.process.send_signal(signal.SIGINT)
        run.read_until("[0] busy", "[1] busy")
        run.process.send_signal(signal.SIGINT)
        result = run.finish()
    assert result.status == 130
    assert all(has_ended(pid) for pid in _pids(result.out.splitlines()[:2]))


def test_the_terminals_ctrl_c_reaches_the_workers_once(tmp_path: Path) -> None:
    """The terminal signals the launcher's whole process group: workers must not be in it."""
    program = script(tmp_path, "print('ready', os.getpid())\nsignal.pause()")
    with Launched(tmp_path, "run", "--nproc", "2", program) as run:
        pids = _pids(run.read_lines(2))
        groups = {os.getpgid(pid) for pid in pids}
        assert groups == set(pids)
        assert os.getpgid(run.process.pid) not in groups


def test_workers_die_with_a_launcher_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    program = script(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', os.getpid())\nwhile True: signal.pause()")
    with Launched(tmp_path, "run", "--nproc", "2", program) as run:
        pids = _pids(run.read_lines(2))
        assert not has_ended(pids[0], within_s=0)
        run.process.kill()
        assert all(has_ended(pid) for pid in pids)
    assert list(temporary.iterdir()) == []


def _pids(ready_lines: list[str]) -> list[int]:
    return [int(line.split()[2]) for line in ready_lines]
