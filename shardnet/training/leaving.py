"""The end of an interrupted process, without the part of Python's shutdown that helps nobody.

[Note: leaving at once] When a process ends, Python frees every object, one by one. With torch and what its optimizers import this takes a
second or more, while somebody who pressed Ctrl-C waits. So a process that a signal has ended does everything that Python promises for the
end of a program, and then leaves at once: it runs `finally` and `with` blocks, waits for threads that are no daemons, and calls `atexit`
functions; and it closes files, so that nothing written is lost. Only `__del__` of other objects that are still alive is not called, which
Python does not promise either.
"""

import _io
import atexit
import ctypes
import gc
import io
import os
import sys
import traceback
from contextlib import suppress
from typing import NoReturn


def leave_child() -> NoReturn:
    """End a child that the program has forked and that leaves the program as if it were the parent. It ends with what it has raised, as
    Python would, but without taking down an event loop and threads that are the parent's."""
    error, status = sys.exception(), 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if status == 1 and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # there is no such stream, or nobody reads it
            stream.flush()
    os._exit(status)


class Interrupted(SystemExit):
    """A signal has ended the program: exit status 128 + its number, soon. Code that catches this goes on as after any SystemExit."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._status = 128 + number

    @property
    def code(self) -> int:  # type: ignore[override]  # an attribute there
        """The exit status. Python itself reads it, without a calling frame, when nobody has caught this and the process ends."""
        with suppress(ValueError):
            sys._getframe(1)
            return self._status
        atexit.register(_leave, self._status)
        return self._status


def _leave(status: int) -> None:
    """See [Note: leaving at once]; Python has already waited for threads."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for file in sorted(filter(_is_file, gc.get_objects()), key=_depth):
        with suppress(Exception):  # it cannot be written, and nobody is left to be told
            file.close()  # standard streams, too: their descriptors stay open
    ctypes.CDLL(None).fflush(None)  # what extensions have printed
    os._exit(status)


def _is_file(each: object) -> bool:
    """Not by isinstance: that asks objects for their class, and proxies answer for the object they stand for, or raise."""
    return issubclass(type(each), _io._IOBase)


def _depth(file: object) -> int:
    """The order of closing: text files first, then compressing files, then the buffers that write to the system, since each writes to the
    next."""
    return 0 if isinstance(file, io.TextIOBase) else 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.RawIOBase) else 1
