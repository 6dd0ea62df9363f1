"""A run's rows on disk, and as text."""

import json
from pathlib import Path

from benchmarks.render import as_markdown, as_text
from benchmarks.row import Row
from benchmarks.tables import tables

PREFACE = (
    "Written by `python -m benchmarks --results`, which `make bench` runs; [how to read it](../README.md#how-to-read-it) and "
    "[what to make of it](../README.md#results)."
)


def write_json(rows: list[Row], path: Path) -> None:
    """A list of objects with the fields of `Row`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.to_dict() for row in rows], indent=1) + "\n")


def read_json(path: Path) -> list[Row]:
    """Raises OSError, or ValueError if the file is none of ours."""
    try:
        return [Row.from_dict(fields) for fields in json.loads(path.read_text())]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} was not written by this version of the benchmarks: {error}") from error


def write_tables(rows: list[Row], directory: Path) -> Path:
    """Write all tables as one page; return its path."""
    path = directory / "tables.md"
    path.write_text(f"# Tables of one run\n\n{PREFACE}\n\n{markdown_report(rows)}\n")
    return path


def text_report(rows: list[Row]) -> str:
    return "\n\n".join([*(as_text(table) for table in tables(rows)), *_origin(rows)])


def markdown_report(rows: list[Row]) -> str:
    return "\n\n".join([*(as_markdown(table) for table in tables(rows)), *_origin(rows)])


def _origin(rows: list[Row]) -> list[str]:
    """Where and when the numbers were measured."""
    return sorted({f"{row.machine}; {row.measured_at}" for row in rows if row.machine})
