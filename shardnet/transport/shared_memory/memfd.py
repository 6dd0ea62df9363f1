"""Memory without a file name: made by one process, and found by others below /proc."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; in Python's fcntl from 3.13 on


class Stranger(OSError):
    """A process that cannot be seen, or that is gone."""

    def __init__(self) -> None:
        super().__init__("its process cannot be seen from here (is it in another container?)")


def allocate(name: str, size: int) -> int:
    """A descriptor of new memory of a fixed size, all of it allocated from the beginning. Raises OSError if there is not enough memory."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memfd")
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def keep_others_from_writing(descriptor: int) -> None:
    """Seal it: from now on nobody can map it for writing; existing writable mappings stay writable."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE)


@contextmanager
def found(name: str, pid: int, descriptor: int, size: int, *, inode: int | None = None, write: bool = False) -> Iterator[int]:
    """Open, for a moment, a descriptor of memory that another process has allocated. Raises Stranger if that process cannot be seen, or no
    longer has the memory, and another OSError, saying why, if the memory is not as expected."""
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        target = str(path.readlink())
    except FileNotFoundError:
        raise Stranger from None
    if target != f"/memfd:{name} (deleted)":  # the number may belong to another process here, whose files must not be touched
        raise Stranger
    opened = os.open(path, (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if inode is not None and os.fstat(opened).st_ino != inode:
            raise Stranger
        if not fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or os.fstat(opened).st_size != size:
            raise OSError("its memory is not what was offered")
        yield opened
    finally:
        os.close(opened)
