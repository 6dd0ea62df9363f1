"""`answering()`: SIGUSR1 makes a process that is in `connect()` print what it is doing.

[Note: the doorbell] A handler in Python runs in the main thread, and only between two of its bytecodes: not while it is in a long
computation of torch, and never if it hangs there. So the handler is written in C: faulthandler's. It writes the stack of the thread that
got the signal, mostly the main one, into a pipe. This wakes a thread of ours, which prints the stacks of all threads and the rest. Our
thread needs the interpreter lock. While other code holds the lock, our thread waits, but the stack in the pipe is still from the moment
of the signal. faulthandler could also write the stacks of all threads while they run, but that may crash a healthy process. The wakeup
descriptor of Python's own handlers (`signal.set_wakeup_fd`) would do as well, but a process has only one, and it belongs to the program's
event loop.
"""

import faulthandler
import logging
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

log = logging.getLogger(__name__)

_SIGNAL = signal.SIGUSR1
_QUIET_MS = 50  # after so long without data a stack, which comes in many small pieces, is complete
_STATUS = Path("/proc/self/status")


@contextmanager
def answering(text: Callable[[str], str]) -> Iterator[None]:
    """Print `text(stack)` to stderr at each SIGUSR1. This works only from the main thread, and only if nobody else has a handler of
    any kind for the signal; otherwise it does nothing."""
    if threading.current_thread() is not threading.main_thread() or _is_taken():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)  # a handler must not wait for a reader
    closing = threading.Event()
    thread = threading.Thread(target=_listen, args=(reads, text, closing), name="shardnet-doorbell", daemon=True)
    thread.start()
    faulthandler.register(_SIGNAL, file=writes, all_threads=False)
    try:
        yield
    finally:
        _give_back()
        closing.set()
        os.write(writes, b"\n")  # closing it is not enough: a forked process may have it, too
        thread.join()
        os.close(reads)
        os.close(writes)


def _is_taken() -> bool:
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return True
    try:  # Python does not know handlers of C code, such as that of an outer connect()
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _STATUS.read_text(), re.MULTILINE)
    except OSError:  # no Linux
        return False
    return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def _give_back() -> None:
    """Restore the handler that was there before, or one that the program has set since then, which faulthandler does not know of."""
    newer = signal.getsignal(_SIGNAL)
    faulthandler.unregister(_SIGNAL)
    if newer is not signal.SIG_DFL and newer is not None:
        signal.signal(_SIGNAL, newer)


def _listen(reads: int, text: Callable[[str], str], closing: threading.Event) -> None:
    poll = select.poll()
    poll.register(reads, select.POLLIN)
    while True:
        found = os.read(reads, 65536)
        while not closing.is_set() and poll.poll(_QUIET_MS):
            found += os.read(reads, 65536)
        if closing.is_set():
            return
        try:
            said = text(found.decode(errors="replace"))
        except Exception:
            log.exception("this process could not report what it is doing (SIGUSR1)")
            continue
        with suppress(OSError, ValueError, AttributeError):  # there is no stderr, or none any more
            sys.stderr.write(said)
            sys.stderr.flush()
