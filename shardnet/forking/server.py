"""`serve`: runs in the process that forks others; these begin with everything imported that it has imported.

[Note: fork server] Importing torch and its compiler takes 4 s of processor time and 300 MB of memory. So one process imports everything,
starts no thread, and then forks whenever a request comes through a socket: the imported modules are in memory only once, and new
processes have them at once. The kernel kills a new process when the process that has forked it dies.

A request is a list of texts, with a zero byte between them. "ready" waits for the imports. "fork" is followed by the task of the new
process; with it come descriptors for its standard input, output and errors, as far as given, and then others, whose numbers the process
is told. The answer is its pid, or minus the error number if it cannot be forked. "wait" and a pid wait until that process has ended; the
answer is its exit status, negative for a signal.
"""

import ctypes
import errno
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

MAX_REQUEST_BYTES = 128 * 1024  # of one packet; as much as a socket takes by default
MAX_DESCRIPTORS = 4
SEPARATOR = "\0"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True, slots=True)
class Forked:
    """What a new process should do.

    task         the texts of the request
    descriptors  those beyond standard errors; programs that it starts do not inherit them
    """

    task: Sequence[str]
    descriptors: Sequence[int]


def preload(modules: Sequence[str]) -> None:
    """Import the modules that the forked processes will need. Raises the errors of the imports."""
    for module in modules:
        importlib.import_module(module)


def serve(*, sessions: bool = False) -> Forked | None:
    """Fork and reap as requested through the socket that is this process's standard input, until it closes; then returns None. Also returns
    in each forked process, whose standard input is empty unless it got another one. Raises RuntimeError if there are threads.

    sessions  each forked process leads a session of its own, so that the processes that it starts can be ended with it; the system may
              schedule processors by session
    """
    control = socket.socket(fileno=os.dup(0))
    _put(os.open(os.devnull, os.O_RDWR), 0)
    if threading.active_count() > 1:
        raise RuntimeError(
            "cannot fork while other threads run, because a new process would lose them and keep their locks; threads: "
            f"{', '.join(each.name for each in threading.enumerate())}"
        )
    gc.collect()
    gc.freeze()  # otherwise the first garbage collection of each process would copy all memory that it shares with the others
    usual = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it is meant for one of the others, and here it would end all of them
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, MAX_DESCRIPTORS)
        match os.fsdecode(request).split(SEPARATOR):
            case [""]:
                return None
            case ["ready"]:
                control.send(b"0")
            case ["wait", pid]:
                control.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(int(pid), 0)[1]))
            case ["fork", *task]:
                try:
                    child = _fork(sessions)
                except OSError as error:  # this does not affect the others
                    child = -(error.errno or errno.EAGAIN)
                if child == 0:
                    signal.signal(signal.SIGUSR1, usual)
                    control.close()
                    for number, descriptor in enumerate(descriptors[:3]):
                        _put(descriptor, number)
                    return Forked(task, descriptors[3:])
                for descriptor in descriptors:
                    os.close(descriptor)
                control.send(b"%d" % child)


def _fork(leads: bool) -> int:
    """Like os.fork. If the child should lead a session, it does so before this returns in the parent, so that a signal to its group reaches
    it."""
    began, begins = os.pipe()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent has died before the prctl
            os._exit(1)
        if leads:
            os.setsid()
        _seed_anew()
        os.close(began)
        os.close(begins)
        return 0
    os.close(begins)
    os.read(began, 1)  # reads nothing, and returns only when the child has closed its end, or is gone
    os.close(began)
    return child


def _seed_anew() -> None:
    """Seed torch and numpy again, or all processes would draw the same numbers; Python reseeds its own generator after a fork."""
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _put(descriptor: int, number: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)
