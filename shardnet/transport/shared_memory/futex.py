"""Waiting for a word of shared memory to change, without burning a core (futex(2)); other threads of this process run meanwhile."""

import ctypes
import errno
import os
import platform
import sys
import time
from collections.abc import Sequence

_SYSCALL, _WAITV = 202, 449  # of x86-64; the second is there since Linux 5.16
_WAIT, _WAKE = 0, 1  # not the PRIVATE ones: the waiting and the waking process differ
_EVERYBODY = 2**31 - 1
_WORD_OF_32_BITS = 2

# A thread that finds the word changed must also find everything that was written before it. These processors keep the order of writes;
# others need a memory barrier, which Python does not offer.
available = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


class _Span(ctypes.Structure):
    """struct timespec"""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Place(ctypes.Structure):
    """struct futex_waitv"""

    _fields_ = (("seen", ctypes.c_uint64), ("address", ctypes.c_uint64), ("flags", ctypes.c_uint32), ("reserved", ctypes.c_uint32))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)

give_way = _libc.sched_yield
"""Let another thread run on this core, of whichever process: unlike os.sched_yield it lets go of the interpreter, too."""


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until somebody wakes the threads that wait at `address`; or not at all if the 32-bit word there is no longer `seen`. It may
    also return earlier, for no reason."""
    span = _span(max(timeout_s, 0.0))
    if _syscall(_SYSCALL, address, _WAIT, seen, ctypes.addressof(span), None, 0) == -1:
        _check_error()


def wait_any(places: Sequence[tuple[int, int]], timeout_s: float) -> None:
    """The same for several words, until the first of them changes: pairs of address and `seen`, at most `most`."""
    if len(places) == 1:
        wait(*places[0], timeout_s)
        return
    waiters = (_Place * len(places))(*(_Place(seen, address, _WORD_OF_32_BITS, 0) for address, seen in places))
    until = _span(time.monotonic() + max(timeout_s, 0.0))
    if _syscall(_WAITV, ctypes.addressof(waiters), len(places), 0, ctypes.addressof(until), time.CLOCK_MONOTONIC, 0) == -1:
        _check_error()


def wake(address: int) -> None:
    """Wake all threads that wait at `address`. Also a memory barrier: everybody sees what this thread wrote before the call before this
    thread reads anything after it."""
    _syscall(_SYSCALL, address, _WAKE, _EVERYBODY, None, None, 0)


def _span(seconds: float) -> _Span:
    return _Span(int(seconds), int(seconds % 1 * 1e9))


def _check_error() -> None:
    """Raise the error of the last call, unless it is one that normally ends a wait."""
    error = ctypes.get_errno()
    if error not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        raise OSError(error, os.strerror(error))


def _find_most() -> int:
    """Call futex_waitv without a word: it answers EINVAL where it exists; an older kernel or a forbidding sandbox gives another error."""
    return 128 if _syscall(_WAITV, None, 0, 0, None, None, 0) == -1 and ctypes.get_errno() == errno.EINVAL else 1


most = _find_most() if available else 0  # words for which one call can wait
