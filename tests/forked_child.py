"""Forked children of a process that has other threads, as a worker of a DataLoader is one: what they find."""

import os
import signal
from collections.abc import Callable

PATIENCE_S = 20  # far above what a child needs; only a hang reaches it


def in_a_child(work: Callable[[], object]) -> str:
    """What `work` returns in a forked child, or the name of the error that it raises there; empty if it hangs."""
    here, there = os.pipe()
    if (child := fork()) == 0:
        try:
            os.write(there, _outcome(work).encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        outcome = pipe.read()
    status_of(child)
    return outcome


def fork() -> int:
    """`os.fork`, but with a child that is killed if it hangs."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(PATIENCE_S)
    return child


def status_of(child: int) -> int:
    """Wait for a child's end; returns its exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _outcome(work: Callable[[], object]) -> str:
    try:
        return str(work())
    except BaseException as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__
