"""Commands that start other processes, which all end with the command."""

import os
import signal
import subprocess
from pathlib import Path

_LAST_WORDS_S = 10.0


def run(command: list[str], folder: Path, within_s: float) -> "subprocess.CompletedProcess[str]":
    """Run a command; return its output and how it ended. If it does not end in time, it is killed with all that it has started; the error
    has its output, and where its threads were."""
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{command} did not end within {within_s:g} s:\n{_last_words(process)}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _last_words(process: "subprocess.Popen[str]") -> str:
    """Kill all processes of a session, after each has said where its threads are."""
    os.killpg(process.pid, signal.SIGABRT)
    try:
        out, err = process.communicate(timeout=_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
    return out + err
