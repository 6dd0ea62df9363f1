"""`JsonLines`: a line for each record, at the end of a file."""

from pathlib import Path
from typing import TextIO

from shardnet.training.tracking.record import Record

NAME = "metrics.jsonl"


class JsonLines:
    """Made at the first record. What an earlier run has written stays: where a step is there again the last line counts."""

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
        self._file.write(record.as_json() + "\n")
        self._file.flush()  # whoever follows the file sees it

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
