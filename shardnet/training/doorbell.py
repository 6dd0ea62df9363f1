"""`answering()`: SIGUSR1 to a process that is in `connect()` has it print what it does.

[Note: the doorbell] A handler in Python runs in the main thread, and only between two of its bytecodes: not while it is in a long
computation of torch, and never if it hangs there. So the handler is one in C, faulthandler's. It writes the stack of the thread that the
signal came to, mostly the main one, into a pipe, which wakes a thread of ours; and that one prints the stacks of all threads and the
rest. It needs the interpreter for it. While other code holds that, all waits, but the stack in the pipe is that of the very moment. What
faulthandler could do more, write the stacks of all threads while they run, may crash a healthy process. The wakeup descriptor of Python's
own handlers (`signal.set_wakeup_fd`) would do as well, but there is one in a process, and it belongs to the program's event loop.
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
_QUIET_MS = 50  # then a stack, which comes in many small pieces, is complete
_STATUS = Path("/proc/self/status")


@contextmanager
def answering(text: Callable[[str], str]) -> Iterator[None]:
    """Print `text(stack)` to stderr at each SIGUSR1. Only from the main thread, and only where nobody else has a handler for it, of
    whatever kind; else this does nothing."""
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
    try:  # handlers of C code, such as that of an outer connect(), Python knows nothing of
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _STATUS.read_text(), re.MULTILINE)
    except OSError:  # no Linux
        return False
    return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def _give_back() -> None:
    """The handler that was there before, or one that the program has set meanwhile, which faulthandler knows nothing of."""
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
            log.exception("this process cannot say what it does")
            continue
        with suppress(OSError, ValueError, AttributeError):  # there is no stderr, or none any more
            sys.stderr.write(said)
            sys.stderr.flush()
