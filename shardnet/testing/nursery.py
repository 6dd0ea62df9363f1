"""`Nursery`: where worker processes come from."""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

PATIENCE_S = 45.0  # far above what forking takes, and importing torch before the first one; only a hang reaches it
IMPORT_S = 300.0  # also for a machine that has more to do than it can


class Nursery:
    """A process that forks others (shardnet/testing/forking.py). It costs some seconds, so a test session has one. Any thread may ask, in
    turn: who waits for a process that does not end holds up the others.

    modules  what the others need imported, by their names
    cwd      their working directory
    """

    def __init__(self, *modules: str, cwd: Path | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(PATIENCE_S)
        self._asking = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardnet.testing.forking", str(theirs.fileno()), *modules],
                cwd=cwd,
                env=os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for who uses it: it must be there to the end, to wait for the others
            )

    def wait_until_ready(self) -> None:
        """Until everything is imported. Raises TimeoutError, or ConnectionError if it has ended."""
        self._control.settimeout(IMPORT_S)
        self._ask("ready")
        self._control.settimeout(PATIENCE_S)

    def fork(self, function: str, *arguments: str, descriptors: Sequence[int]) -> int:
        """The pid of a new process that calls "module:name" and ends with what it returns as its exit status, with these descriptors for
        its standard input, output and errors, as far as there are any; the numbers of further ones are further arguments."""
        return self._ask("call", function, *arguments, descriptors=descriptors)

    def wait(self, pid: int) -> int:
        """Wait until a process has ended; its exit status, negative for a signal. Until then nobody else can get its pid."""
        return self._ask("wait", str(pid))

    def wait_or_kill(self, pid: int, within_s: float) -> int:
        """The same of a process that is killed if it has not ended in time."""
        ended = os.pidfd_open(pid)
        try:
            if not select.select([ended], [], [], within_s)[0]:
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(ended)
        return self.wait(pid)

    def _ask(self, *request: str, descriptors: Sequence[int] = ()) -> int:
        with self._asking:
            socket.send_fds(self._control, ["\n".join(request).encode()], descriptors)
            answer = self._control.recv(64)
        if not answer:
            raise ConnectionResetError(f"the process that makes others has ended (pid {self._process.pid})")
        return int(answer)

    @property
    def ended(self) -> bool:
        """Whether it has ended of itself, or somebody has killed it."""
        return self._process.poll() is not None

    @property
    def alive(self) -> list[psutil.Process]:
        """Processes that nobody has waited for, and what they have started."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def close(self) -> None:
        self._control.close()
        self._process.wait(PATIENCE_S)
