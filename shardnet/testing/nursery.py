"""`Nursery`: where worker processes come from."""

import os
import sys
from pathlib import Path

from shardnet.forking import nursery


class Nursery(nursery.Nursery):
    """One for functions (shardnet/testing/forking.py): `fork` takes "module:name" and its arguments; the process ends with what it
    returns as its exit status. It costs some seconds, so a test session has one.

    modules  what the processes need imported, by their names
    """

    def __init__(self, *modules: str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-m", "shardnet.testing.forking", *modules]
        super().__init__(command, os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"), cwd)
