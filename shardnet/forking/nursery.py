"""`Nursery`: a process that forks others, seen from the process that asks it to."""

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from shardnet.forking.server import SEPARATOR

PATIENCE_S = 45.0  # far above what forking takes; only a hang reaches it
IMPORT_S = 300.0  # enough even for an overloaded machine


class Nursery:
    """Runs a command that serves (see server.py), with nothing imported yet. Any thread may ask, one at a time: a thread that waits for a
    process that does not end holds up the others. A request without an answer, because it took too long or was interrupted, is the last:
    the process is ended, with those that it has forked, and further requests raise ConnectionError.

    environment  of that process, and of those that it forks
    cwd          their working directory; None: this process's
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], cwd: Path | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._asking = threading.Lock()
        self._given_up = False
        with theirs:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=theirs.fileno(),
                start_new_session=True,  # Ctrl-C must reach only its user: this process must live to the end, to wait for the others
            )

    def wait_until_ready(self) -> None:
        """Wait until everything is imported. Raises TimeoutError, or ConnectionError if it has ended."""
        self._ask("ready", within_s=IMPORT_S)

    def fork(self, *task: str, descriptors: Sequence[int] = ()) -> int:
        """Fork a new process, which gets this task; returns its pid. The first three descriptors, as far as given, become its standard
        input, output and errors, and it gets the others, too. Raises as `wait_until_ready`, and OSError if the system cannot fork it."""
        pid = self._ask("fork", *task, descriptors=descriptors)
        if pid < 0:
            raise OSError(-pid, f"no process could be forked: {os.strerror(-pid)}")
        return pid

    def wait(self, pid: int) -> int:
        """Wait until a process has ended; returns its exit status, negative for a signal. Until then no other process can get its pid."""
        return self._ask("wait", str(pid))

    def wait_or_kill(self, pid: int, within_s: float) -> int:
        """The same, but kill the process if it has not ended in time."""
        ended = os.pidfd_open(pid)
        try:
            if not select.select([ended], [], [], within_s)[0]:
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(ended)
        return self.wait(pid)

    def _ask(self, *request: str, descriptors: Sequence[int] = (), within_s: float = PATIENCE_S) -> int:
        with self._asking:
            self._control.settimeout(within_s)
            try:
                socket.send_fds(self._control, [os.fsencode(SEPARATOR.join(request))], descriptors)
                answer = self._control.recv(64)
            except ConnectionError:
                answer = b""
            except BaseException as error:
                if isinstance(error, TimeoutError) or not isinstance(error, OSError):  # otherwise it could not be sent
                    self._given_up = True
                    self._end()  # its answer could still come, and the next request would take it for its own
                raise
        if not answer:
            raise ConnectionResetError(f"the fork server (pid {self._process.pid}) {self._ending}")
        return int(answer)

    @property
    def _ending(self) -> str:
        if self._given_up:
            return "was ended, because it had left a request unanswered"
        with suppress(subprocess.TimeoutExpired):  # a process that it has started may hold the other end
            code = self._process.wait(PATIENCE_S)
            if code < 0:
                hint = " (the system does this when memory runs out)" if code == -signal.SIGKILL else ""
                return f"was killed by {signal.Signals(-code).name}{hint}"
        return "has ended"

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself, or was killed."""
        return self._given_up or self._process.poll() is not None

    @property
    def alive(self) -> list[psutil.Process]:
        """Processes for which nobody has waited yet, and the processes that they have started."""
        return psutil.Process(self._process.pid).children(recursive=True)

    def close(self) -> None:
        """End it and the processes that it has started; the processes that it has forked end with it. A thread that asks it meanwhile gets
        a ConnectionError."""
        self._end()
        with self._asking:
            self._control.close()
        self._process.wait(PATIENCE_S)

    def _end(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # no process is left
            os.killpg(self._process.pid, signal.SIGKILL)  # it may be in the middle of an import
        self._control.shutdown(socket.SHUT_RDWR)  # a daemon that was started in one may have the other end, too
