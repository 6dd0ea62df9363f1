"""A file that goes to the disk past the system's page cache.

[Note: past the page cache] A copy into the cache takes the processor from a training that needs all of it: measured, 0.31 s for 147 MiB,
most of them to find pages, against 0.024 s if the disk takes them from a buffer. It also pushes out what others have cached, for bytes
that nobody will read soon.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

_BUFFER_BYTES = 4 * 2**20  # from 1 MiB on, a larger one is no faster
_NOT_SO = (errno.EINVAL, errno.EOPNOTSUPP)  # what a file system says that knows only its cache, or of what is no whole sector: the end
_DIRECT = getattr(os, "O_DIRECT", 0)  # not every system has it


class DirectFile:
    """A new file, written from its start to its end; used with `with`, after which the disk has it. Where the file system knows only its
    cache, it goes through that. Raises OSError."""

    def __init__(self, path: Path, rest: Callable[[], None] | None = None) -> None:
        """rest  called after every few MiB"""
        self._path = path
        self._rest = rest
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))  # begins with a page, as a disk needs it
        self._filled = 0
        self._is_direct = bool(_DIRECT)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno not in _NOT_SO:
                raise
            self._is_direct = False
            self._descriptor = os.open(path, flags, 0o666)

    def write(self, data: bytes | memoryview) -> None:
        """Put bytes behind those before; they may be changed when this returns."""
        rest = memoryview(data).cast("B")
        while rest:
            part = rest[: _BUFFER_BYTES - self._filled]
            # By numpy, as it lets go of Python's lock: who holds it in an idle thread makes all others wait for its turn.
            np.copyto(np.frombuffer(self._buffer, np.uint8)[self._filled : self._filled + len(part)], np.frombuffer(part, np.uint8))
            self._filled += len(part)
            rest = rest[len(part) :]
            if self._filled == _BUFFER_BYTES:
                self._empty()
                if self._rest is not None:
                    self._rest()

    def _empty(self) -> None:
        rest = self._buffer[: self._filled]
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno not in _NOT_SO or not self._is_direct:
                    raise OSError(error.errno, error.strerror, str(self._path)) from error
                self._go_through_cache()
        self._filled = 0

    def _go_through_cache(self) -> None:
        if self._is_direct:
            self._is_direct = False
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, fcntl.fcntl(self._descriptor, fcntl.F_GETFL) & ~_DIRECT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if kind is None:
                self._empty()
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
