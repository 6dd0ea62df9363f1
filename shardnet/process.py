"""What this process asks of the system to make training over a network faster, or to save memory."""

import ctypes
import resource
import sys
from collections.abc import Callable

# A thread that runs pure Python gives up the interpreter (the GIL) only this often, and the loop thread waits for it meanwhile.
# With Python's own 5 ms a chunk waits up to 10 ms (p99) for its turn; with this value 0.7 ms.
SWITCH_INTERVAL_S = 0.0005

_MANY_FILES = 65536
_M_MXFAST, _M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = 1, -1, -3  # malloc.h
_TRIM_BYTES = 1024 * 1024 * 1024
_MMAP_BYTES = 32 * 1024 * 1024  # the largest value that glibc itself would adjust it to


def tune() -> None:
    """Change settings of this process, for `connect()`. Safe to call again."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _keep_freed_memory()


def allow_many_files() -> None:
    """Raise the limit of open files of this process, and of those that it starts, to this user's maximum. Not for a program that is not
    ours: one that waits by select(2) breaks with descriptors above 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _keep_freed_memory() -> None:
    """Let malloc keep freed memory, up to 1 GiB, rather than give it back to the system.

    Every chunk is a buffer of about 2 MiB that lives for a millisecond. glibc returns such memory to the system and
    faults it in again, page by page: an all-reduce of 64 MiB took 9,000 page faults and 130 ms instead of 1,300 and 105.

    Also let it join small freed blocks with their neighbours at once. Blocks that threads would set aside for themselves
    (tcache) can only be prevented from the start of the process: see cli/launch/environment.py.
    """
    if mallopt := _of_libc("mallopt"):
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_M_MXFAST, 0)


def return_freed_memory() -> None:
    """Have malloc give the freed memory that it keeps back to the system: for when much was freed that nothing will need again."""
    if malloc_trim := _of_libc("malloc_trim"):
        malloc_trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """One of glibc's functions; None under another C library."""
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return function
