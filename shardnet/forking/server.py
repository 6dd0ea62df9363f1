"""`serve`: in the process that forks others, which begin with everything imported that it has.

[Note: fork server] Importing torch and its compiler takes 4 s of processor time and 300 MB of memory. So one process imports everything,
starts no thread, and then forks as often as it is told through a socket: what has been imported is there once, and at once. The kernel
kills a new process when the one that has forked it dies.

A request is a list of texts, with a zero byte between them: "ready"; or "fork" and what the new process shall do, together with the
descriptors that it shall have as its standard input, output and errors, as far as there are any, and others, whose numbers it is told; the
answer is its pid, or minus the number of the error if there can be none. Or "wait" and a pid, until that process has ended; the answer is
its exit status, negative for a signal.
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

MAX_REQUEST_BYTES = 128 * 1024  # of one packet; what a socket takes by default
MAX_DESCRIPTORS = 4
SEPARATOR = "\0"
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True, slots=True)
class Forked:
    """What a new process shall do.

    task         the texts of the request
    descriptors  those beyond standard errors; programs that it starts do not inherit them
    """

    task: Sequence[str]
    descriptors: Sequence[int]


def preload(modules: Sequence[str]) -> None:
    """Import what the forked processes will need. Raises what that raises."""
    for module in modules:
        importlib.import_module(module)


def serve(*, sessions: bool = False) -> Forked | None:
    """Fork and reap as told by the socket that is this process's standard input, until it closes; then returns None. Returns in each
    forked process, too, whose standard input is empty unless it got another one. Raises RuntimeError if there are threads.

    sessions  each forked process leads one of its own, so that what it starts can be ended with it; the system may share out its processors
              by session
    """
    control = socket.socket(fileno=os.dup(0))
    _put(os.open(os.devnull, os.O_RDWR), 0)
    if threading.active_count() > 1:
        raise RuntimeError(
            f"a fork would lose threads, and what they hold locked: {', '.join(each.name for each in threading.enumerate())}"
        )
    gc.collect()
    gc.freeze()  # or each process's first collection copies all that it shares with the others
    usual = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which is meant for one of the others, and would end all of them
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
                except OSError as error:  # the others are none the worse for it
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
    """As os.fork; when it returns in the parent, the child leads a session if it shall, so that a signal for its group finds it."""
    began, begins = os.pipe()
    parent = os.getpid()
    if (child := os.fork()) == 0:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has died before
            os._exit(1)
        if leads:
            os.setsid()
        _seed_anew()
        os.close(began)
        os.close(begins)
        return 0
    os.close(begins)
    os.read(began, 1)  # nothing, but only when the child has closed its end, or is gone
    os.close(began)
    return child


def _seed_anew() -> None:
    """Or all processes would draw the same numbers, which Python's own generator sees to itself."""
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()


def _put(descriptor: int, number: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)
