"""Memory without a name: made by one process, and found by others below /proc."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; in Python's fcntl from 3.13 on


class Stranger(OSError):
    """A process that cannot be seen, or that is gone."""

    def __init__(self) -> None:
        super().__init__("its process is not to be seen from here (is it in another container?)")


def allocate(name: str, size: int) -> int:
    """A descriptor of new memory, which cannot change its size. Raises OSError if there is none: all of it is there from the beginning."""
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
    """From now on nobody can map it for writing; who has, can write on."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | _F_SEAL_FUTURE_WRITE)


@contextmanager
def found(name: str, pid: int, descriptor: int, size: int, *, inode: int | None = None, write: bool = False) -> Iterator[int]:
    """A descriptor of what another process has allocated, for a moment. Raises Stranger if its process is not to be seen, or has it no
    more, and another OSError, saying why, if it is something else."""
    path = Path(f"/proc/{pid}/fd/{descriptor}")
    try:
        target = str(path.readlink())
    except FileNotFoundError:
        raise Stranger from None
    if target != f"/memfd:{name} (deleted)":  # the files of whichever process has the number here are not to be touched
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
