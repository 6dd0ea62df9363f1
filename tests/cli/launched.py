"""`Launched`: the `shardnet` command in a process of its own, as a user starts it."""

import os
import select
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PATIENCE_S = 60.0  # far longer than anything here takes; only a hang reaches it


@dataclass(frozen=True, slots=True)
class Result:
    status: int
    out: str
    err: str


class Launched:
    """A running command; killed if a test leaves before it has ended. Its stdout is read here, its stderr goes to a file.

    merged       stderr is read together with stdout, for tests that wait for the launcher's messages
    new_session  it leads a session of its own, so that its process group can be killed
    """

    def __init__(self, directory: Path, *arguments: str, merged: bool = False, new_session: bool = False) -> None:
        self._directory = directory
        self._err = directory / "stderr.txt"
        self._seen = b""
        with self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "shardnet.cli", *arguments],
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT if merged else err,
                start_new_session=new_session,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def read_until(self, *texts: str) -> str:
        """Read stdout until all `texts` have come; returns everything so far."""
        while not all(text.encode() in self._seen for text in texts):
            assert self._read(), f"the command ended before it printed {texts}; stdout: {self._seen!r}, stderr: {self.err}"
        return self._seen.decode()

    def read_lines(self, count: int) -> list[str]:
        """Read stdout until it has `count` whole lines; returns these."""
        while self._seen.count(b"\n") < count:
            assert self._read(), f"the command ended before it printed {count} lines; stdout: {self._seen!r}, stderr: {self.err}"
        return self._seen.decode().splitlines()[:count]

    def finish(self) -> Result:
        """Read to the end and wait."""
        while self._read():
            pass
        return Result(self.process.wait(PATIENCE_S), self._seen.decode(), self.err)

    @property
    def err(self) -> str:
        return self._err.read_text()

    def _read(self) -> bool:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        assert ready, f"nothing came for {PATIENCE_S} s after {self._seen[-500:]!r}"
        data = os.read(self.process.stdout.fileno(), 65536)
        self._seen += data
        return bool(data)


def shardnet(directory: Path, *arguments: str) -> Result:
    """Run a command to its end."""
    with Launched(directory, *arguments) as command:
        return command.finish()


def script(directory: Path, text: str, name: str = "worker.py") -> str:
    """A worker program; `rank` is its local rank."""
    path = directory / name
    path.write_text("import os, signal, sys\nrank = int(os.environ['SHARDNET_LOCAL_RANK'])\n" + text)
    return str(path)


def has_ended(pid: int, within_s: float = 5.0) -> bool:
    """Wait until a process that is no child of ours has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)
