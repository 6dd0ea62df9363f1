"""The end of an interrupted process, without what Python does for nobody.

[Note: leaving at once] At its end Python frees every object there is, one by one. With torch and what its optimizers import that takes a
second and more, while somebody who pressed Ctrl-C waits. So a process that a signal has ended does all that Python promises for the end
of a program, and then leaves: `finally` and `with` blocks, threads that are no daemons, `atexit` functions; and files are closed here, so
that nothing written is lost. Only `__del__` of other objects that still live is not called, which Python does not promise either.
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
    """End a child that the program has forked and that comes out of it as if it were its parent: by what it has raised, as Python would,
    but without taking down an event loop and threads that are its parent's."""
    error, status = sys.exception(), 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        if status == 1 and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # there is none, or nobody reads it
            stream.flush()
    os._exit(status)


class Interrupted(SystemExit):
    """A signal has ended the program: exit status 128 + its number, soon. Who catches it goes on as after any SystemExit."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self._status = 128 + number

    @property
    def code(self) -> int:  # type: ignore[override]  # an attribute there
        """The exit status. Python itself asks for it, from no frame, when nobody has caught this and the process ends."""
        with suppress(ValueError):
            sys._getframe(1)
            return self._status
        atexit.register(_leave, self._status)
        return self._status


def _leave(status: int) -> None:
    """[Note: leaving at once]; Python has waited for threads before."""
    atexit.unregister(_leave)
    atexit._run_exitfuncs()
    for file in sorted(filter(_is_file, gc.get_objects()), key=_depth):
        with suppress(Exception):  # it cannot be written, and nobody is left whom one could tell
            file.close()  # of a standard stream, too: that leaves its descriptor open
    ctypes.CDLL(None).fflush(None)  # what extensions have printed
    os._exit(status)


def _is_file(each: object) -> bool:
    """Not by isinstance: it asks objects for their class, and those that stand for others answer as these would, or raise."""
    return issubclass(type(each), _io._IOBase)


def _depth(file: object) -> int:
    """Text is closed before what compresses it, and that before the buffer that the system is given: each writes to the next."""
    return 0 if isinstance(file, io.TextIOBase) else 2 if isinstance(file, io.BufferedWriter | io.BufferedRandom | io.RawIOBase) else 1
