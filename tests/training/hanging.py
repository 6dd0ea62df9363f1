"""A process whose main thread hangs in C code, for tests/training/test_doorbell.py."""

import asyncio
import ctypes
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import shardnet

TRIES, EVERY_S = 300, 0.1


def hang(path: str) -> None:
    """Let the main thread wait for a lock that nobody releases, as in an endless computation; the text goes to `path`."""
    sys.stderr = said = io.StringIO()
    reached = threading.Event()

    def ring() -> None:
        reached.wait()
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(TRIES):
            if "end of the report of process" in said.getvalue():
                break
            time.sleep(EVERY_S)
        Path(path).write_text(said.getvalue())
        os._exit(0)  # nothing else would end the main thread

    threading.Thread(target=ring, name="ringing").start()
    asyncio.run(_enter(reached))


async def _enter(reached: threading.Event) -> None:
    async with shardnet.connect() as cluster:
        cluster.report(step=12)
        mutex = ctypes.create_string_buffer(64)  # zeros: PTHREAD_MUTEX_INITIALIZER
        lock = ctypes.CDLL(None).pthread_mutex_lock
        lock(mutex)
        reached.set()
        lock(mutex)
