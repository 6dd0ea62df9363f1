"""`Nursery`: forks worker processes."""

import os
import sys
from pathlib import Path

from shardnet.forking import nursery


class Nursery(nursery.Nursery):
    """A nursery for functions (shardnet/testing/forking.py): `fork` takes "module:name" and arguments; the function's result is the
    exit status of the process. It takes some seconds to start, so a test session has one.

    modules  names of the modules that the processes need
    """

    def __init__(self, *modules: str, cwd: Path | None = None) -> None:
        command = [sys.executable, "-m", "shardnet.testing.forking", *modules]
        super().__init__(command, os.environ | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"), cwd)
