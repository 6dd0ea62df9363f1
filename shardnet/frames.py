"""What all threads are doing, for tools that look at the process."""

import gc
import sys
from types import FrameType


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread, by thread id. The frames keep the locals of all threads alive: drop them soon.

    No garbage is collected meanwhile: up to Python 3.11.8 `sys._current_frames` holds a lock that the end of a `threading.local` takes.
    If one is collected at that time, the whole process hangs for ever (https://github.com/python/cpython/issues/106883).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()  # noqa: TID251
    finally:
        if collects:
            gc.enable()
