"""`Journal`: the first rank writes down what it measures, and the process that started it reads along.

It is a file, because asking the worker over its port would take CPU time from what is measured.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.row import Row, Timing
from shardnet.telemetry import Progress


@dataclass(frozen=True, slots=True)
class Alone:
    """What one engine needed for a training that ran by itself."""

    timing: Timing
    peak_bytes: int
    parameter_bytes: int
    loss: float  # of rank 0 at the last step


class Journal:
    """Lines of JSON; each is a row, or says how far the session is. One process writes, another reads."""

    FILE_NAME = "journal"  # in the directory that the processes of a session share

    def __init__(self, path: Path) -> None:
        self._path = path

    def progress(self, done: int, total: int, note: str) -> None:
        self._append({"progress": [done, total, note]})

    def add(self, row: Row) -> None:
        self._append({"row": row.to_dict()})

    def add_alone(self, alone: Alone) -> None:
        self._append({"alone": asdict(alone)})

    def alone(self) -> Alone:
        (found,) = (entry["alone"] for entry in self._read() if "alone" in entry)
        timing = found.pop("timing")
        return Alone(Timing(tuple(timing["wall_s"]), timing["cpu_s"]), **found)

    def rows(self) -> list[Row]:
        return [Row.from_dict(entry["row"]) for entry in self._read() if "row" in entry]

    def last_progress(self) -> Progress:
        entries = [entry["progress"] for entry in self._read() if "progress" in entry]
        done, total, note = entries[-1] if entries else (0, 0, "")
        return Progress(step=done, total_steps=total, note=note)

    def _append(self, entry: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def _read(self) -> list[dict[str, Any]]:
        if not self._path.exists():
            return []
        lines = self._path.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
