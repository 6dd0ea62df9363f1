"""Settings of this process that make training over a network faster; applied by `connect()`."""

import ctypes
import sys

# A thread that runs pure Python gives up the interpreter only this often, and the loop thread waits for it meanwhile.
# With Python's own 5 ms a chunk waits up to 10 ms (p99) for its turn; with this 0.7 ms.
SWITCH_INTERVAL_S = 0.0005

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_TRIM_BYTES = 256 * 1024 * 1024
_MMAP_BYTES = 32 * 1024 * 1024  # the largest that glibc's own adjustment would reach


def tune() -> None:
    """Set them. Safe to call again."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Let malloc keep what was freed, up to 256 MiB, rather than give it back to the system.

    Every chunk is a buffer of about 2 MiB that lives for a millisecond. glibc returns such memory to the system and
    faults it in again, page by page: an all-reduce of 64 MiB took 9,000 page faults and 130 ms instead of 1,300 and 105.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
