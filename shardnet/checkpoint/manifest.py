"""`Manifest`: what a checkpoint consists of. A folder without a manifest is no checkpoint."""

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from crc32c import crc32c

from shardnet.checkpoint.rank_file import FileEntry
from shardnet.errors import CheckpointError
from shardnet.state import Kept, Span, Whole

NAME = "manifest.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """All that must be known to find something in the files."""

    id: str
    step: int
    files: tuple[FileEntry, ...]  # by rank
    spans: tuple[tuple[Span, ...], ...]  # the spans that each file has
    sizes: dict[str, int]  # elements of each parameter
    kinds: tuple[str, ...]  # of things, in order
    modules: tuple[tuple[Kept, ...], ...]  # of each thing: the tensors of its state_dict, if it has one

    def write(self, folder: Path) -> None:
        """Write it into a folder; returns when the disk has it. Raises OSError."""
        body = json.dumps({"format": _FORMAT, **asdict(self), "spans": [[_row(span) for span in spans] for spans in self.spans]}, indent=1)
        with (folder / NAME).open("w") as file:
            file.write(json.dumps({"crc32c": crc32c(body.encode())}) + "\n" + body + "\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read it from a folder. Raises CheckpointError for anything but what was written, and for what cannot have been."""
        path = folder / NAME
        try:
            seal, body = path.read_bytes().split(b"\n", 1)
            if json.loads(seal)["crc32c"] != crc32c(body.rstrip(b"\n")):
                raise CheckpointError(f"{path} cannot be used: its content does not match its checksum")
            found = json.loads(body)
            if found["format"] != _FORMAT:
                raise CheckpointError(
                    f"{path} has format {found['format']}, but this shardnet reads format {_FORMAT}; use the version that wrote it"
                )
            read = cls(
                found["id"],
                found["step"],
                tuple(FileEntry(**entry) for entry in found["files"]),
                tuple(tuple(Span(*row) for row in spans) for spans in found["spans"]),
                found["sizes"],
                tuple(found["kinds"]),
                tuple(tuple(map(_kept, kept)) for kept in found["modules"]),
            )
            read._check()
            return read
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error

    def _check(self) -> None:
        """Raise ValueError for what no shardnet has written, though its checksum be right. Whoever reads it can then rely on types, and on
        names that are there."""
        for of, is_right in (
            ("id", _is_a(str, self.id)),
            ("step", _is_count(self.step)),
            ("sizes", _is_a(dict, self.sizes) and all(map(_is_count, self.sizes.values()))),
            ("files", bool(self.files) and all(map(_is_file, self.files))),
            ("spans", len(self.spans) == len(self.files) and all(self._has(span) for spans in self.spans for span in spans)),
            ("modules", len(self.modules) == len(self.kinds) and all(self._can_be(kept) for each in self.modules for kept in each)),
        ):
            if not is_right:
                raise ValueError(f"its entry '{of}' is not valid")

    def _has(self, span: Span) -> bool:
        """Whether a span lies within a parameter."""
        known = _is_a(str, span.name) and span.name in self.sizes and _is_count(span.start) and _is_count(span.stop)
        return known and span.start <= span.stop <= self.sizes[span.name]

    def _can_be(self, kept: Kept) -> bool:
        """Whether a module's tensor is kept whole, or is a parameter of that size."""
        if kept.spread is None:
            return kept.own is None or _is_a(str, kept.own)
        name, shape, dtype = kept.spread
        known = _is_a(str, name) and name in self.sizes and all(map(_is_count, shape)) and _is_a(str, dtype)
        return known and math.prod(shape) == self.sizes[name] and isinstance(getattr(torch, dtype, None), torch.dtype)

    def holders(self) -> dict[str, list[tuple[Span, int]]]:
        """For each parameter, its spans and the files that have them, in order."""
        found: dict[str, list[tuple[Span, int]]] = {name: [] for name in self.sizes}
        for file, spans in enumerate(self.spans):
            for span in spans:
                found[span.name].append((span, file))
        for each in found.values():
            each.sort(key=lambda entry: (entry[0].start, entry[1]))
        return found


def _is_a(kind: type, value: object) -> bool:
    """isinstance, for a value of which the annotation only says what it should be."""
    return isinstance(value, kind)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_file(entry: FileEntry) -> bool:
    """Whether the entry names a file within the folder."""
    return Path(entry.name).name == entry.name and _is_count(entry.size) and _is_count(entry.header_crc32c)


def _kept(row: list[Any]) -> Kept:
    name, spread, own = row
    return Kept(name, None if spread is None else Whole(spread[0], tuple(spread[1]), spread[2]), own)


def _row(span: Span) -> list[str | int]:
    return [span.name, span.start, span.stop]
