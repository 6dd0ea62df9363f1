"""Commands that start processes of their own: all of them end with the command."""

import os
import signal
import subprocess
from pathlib import Path


def run(command: list[str], folder: Path, within_s: float) -> "subprocess.CompletedProcess[str]":
    """What it says and how it ends. One that does not end in time is killed with all that it has started."""
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, err = process.communicate(timeout=within_s)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)
