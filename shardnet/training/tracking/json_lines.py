"""`JsonLines`: a line for each record, at the end of a file."""

import os
from pathlib import Path
from typing import TextIO

from shardnet.training.tracking.record import Record

NAME = "metrics.jsonl"
_LONGEST = 1 << 20  # bytes of a record


class JsonLines:
    """The file is made at the first record. Lines of an earlier run stay: if a step occurs again, its last line counts."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file: TextIO | None = None

    def __str__(self) -> str:
        return str(self._path)

    def write(self, record: Record) -> None:
        """Raises OSError."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a")
            _drop_broken_line(self._path)
        self._file.write(record.as_json() + "\n")
        self._file.flush()  # whoever follows the file sees it

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _drop_broken_line(path: Path) -> None:
    """Remove a last line that an earlier run did not finish, for example because the disk was full."""
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        tail = min(end, _LONGEST)
        file.seek(end - tail)
        file.truncate(end - tail + file.read(tail).rfind(b"\n") + 1)
