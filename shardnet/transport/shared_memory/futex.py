"""Waiting for a word of shared memory to change, without burning a core (futex(2)); other threads of this process run meanwhile."""

import ctypes
import errno
import os
import platform
import sys

_SYSCALL = 202  # of x86-64
_WAIT, _WAKE = 0, 1  # not the PRIVATE ones: who waits and who wakes are different processes
_EVERYBODY = 2**31 - 1

# Whoever finds the word changed must also find what was written before it. These processors keep the order of writes; others need a
# barrier, for which Python has no name.
available = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and sys.maxsize > 2**32


class _Span(ctypes.Structure):
    """struct timespec"""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32)

give_way = _libc.sched_yield
"""Let another thread run on this core, of whichever process: unlike os.sched_yield it lets go of the interpreter, too."""


def wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleep until somebody wakes those who wait there; or not at all if the 32-bit word is not `seen` any more. It may also return
    earlier, for no reason."""
    timeout_s = max(timeout_s, 0.0)
    span = _Span(int(timeout_s), int(timeout_s % 1 * 1e9))
    if _syscall(_SYSCALL, address, _WAIT, seen, ctypes.addressof(span), None, 0) == -1:
        error = ctypes.get_errno()
        if error not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(error, os.strerror(error))


def wake(address: int) -> None:
    """Wake all who wait there. Also a barrier: what this thread wrote before is there for all before it reads anything after."""
    _syscall(_SYSCALL, address, _WAKE, _EVERYBODY, None, None, 0)
