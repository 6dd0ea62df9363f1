"""`Alarm`: wakes a thread a moment after something has happened, unless it is disarmed before (timerfd(2)).

Setting and disarming are one system call each, and neither wakes the sleeping thread.
"""

import ctypes
import os
import sys
import time

_CLOSED_ON_EXEC = 0o2000000
_NOW_S = 1e-9  # the shortest time there is: 0 would be never


class _Times(ctypes.Structure):
    """struct itimerspec: the interval for repetitions, and the time until the first expiry."""

    _fields_ = (
        *(("again_seconds", ctypes.c_long), ("again_nanoseconds", ctypes.c_long)),
        *(("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)),
    )


class Alarm:
    """Any thread may set it, and one thread may sleep on it. Whoever closes it must make sure that nobody uses it any more."""

    def __init__(self, delay_s: float) -> None:
        """delay_s  more than 0

        Raises OSError if the system allows no more of them.
        """
        self._descriptor = _create()
        self._later, self._now, self._never = map(_times, (delay_s, _NOW_S, 0.0))

    def set(self) -> None:
        """Have it go off after its delay, from now on."""
        self._set(self._later)

    def ring(self) -> None:
        """Have it go off now."""
        self._set(self._now)

    def disarm(self) -> None:
        """Keep it from going off, if it has not gone off yet."""
        self._set(self._never)

    def sleep(self) -> None:
        """Sleep until it goes off, or not at all if it has gone off since the last sleep."""
        os.read(self._descriptor, 8)

    def close(self) -> None:
        os.close(self._descriptor)

    def _set(self, times: _Times) -> None:
        _libc.timerfd_settime(self._descriptor, 0, ctypes.byref(times), None)


def _times(delay_s: float) -> _Times:
    return _Times(0, 0, int(delay_s), round(delay_s % 1 * 1e9))


_libc = ctypes.PyDLL(None, use_errno=True)  # it keeps the interpreter during a call: none of these waits for anything


def _create() -> int:
    """Raises OSError."""
    descriptor: int = _libc.timerfd_create(time.CLOCK_MONOTONIC, _CLOSED_ON_EXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def _is_available() -> bool:
    try:
        os.close(_create())
    except (OSError, AttributeError):  # forbidden in a sandbox, or not in the C library
        return False
    return True


available = sys.platform == "linux" and _is_available()
