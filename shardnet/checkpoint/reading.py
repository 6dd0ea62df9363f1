"""What one rank needs of a checkpoint."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardnet.checkpoint.manifest import Manifest
from shardnet.checkpoint.rank_file import RankFile
from shardnet.errors import CheckpointError, UsageError
from shardnet.state import Inventory, Piece, Span, covered, join

log = logging.getLogger(__name__)
_NAMED = 3  # parameters in an error message
_COMPILED = "_orig_mod."  # torch's name for the module in an OptimizedModule


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read: whole, and checked. Tensors may lie in the files."""

    step: int
    pieces: dict[str, Piece]
    rest: list[dict[str, torch.Tensor]]
    shared: dict[str, Any]
    random: dict[str, Any] | None  # None: there was no rank of this number when it was saved


def read(path: Path, inventory: Inventory, rank: int) -> Reading:
    """Read what this rank holds, and little more, out of the checkpoint of a folder.

    Raises CheckpointError for anything but what was written, and UsageError for a checkpoint of other things.
    """
    manifest = Manifest.read(path)
    sizes = inventory.sizes()
    inventory.check_kinds(manifest.kinds, f"when {path} was saved")
    if sizes != manifest.sizes:
        raise UsageError(f"{path} was saved from another model: {_difference(manifest.sizes, sizes)}{_hint(manifest.sizes, sizes)}")
    _check_wholes(path, manifest, inventory, log_casts=rank == 0)
    holders = manifest.holders()
    check_covered(path, manifest, holders)
    files = Files(path, manifest)
    pieces = {name: read_piece(span, holders[name], files) for name, span in inventory.wanted().items()}
    leading, has_own = files[0], rank < len(manifest.files)
    own = files[rank] if has_own else leading
    rest, shared = own.value("rest"), leading.value("shared")
    rest = leading.value("rest") if rest is None else rest
    inventory.check(rest, shared["parts"])
    return Reading(
        manifest.step,
        pieces,
        rest,
        shared,
        own.value("random") if has_own else None,
    )


def check_covered(path: Path, manifest: Manifest, holders: Mapping[str, Sequence[tuple[Span, int]]]) -> None:
    """Raise CheckpointError unless every element of every parameter is in a file."""
    for name, numel in manifest.sizes.items():
        if not covered((span for span, _ in holders[name]), numel):
            raise CheckpointError(f"{path} lacks a part of {name}")


class Files:
    """The files of a checkpoint, opened as they are needed."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._open: dict[int, RankFile] = {}

    def __getitem__(self, number: int) -> RankFile:
        if number not in self._open:
            self._open[number] = RankFile(self._path, self._manifest.files[number], self._manifest.id)
        return self._open[number]


def read_piece(wanted: Span, holders: Sequence[tuple[Span, int]], files: Files, *, only: str | None = None) -> Piece:
    """A span of a parameter, put together from the files that have parts of it; with the key `only` of its state, or with all keys."""
    found = []
    at = wanted.start
    while at < wanted.stop:
        whole, file = next((span, file) for span, file in holders if span.start <= at < span.stop)
        stop = min(whole.stop, wanted.stop)
        piece = files[file].piece(whole, at, stop, only=only)
        if piece.span != whole:
            piece.check_divisible()
        found.append(piece)
        at = stop
    return join(found)


def _check_wholes(path: Path, manifest: Manifest, inventory: Inventory, *, log_casts: bool) -> None:
    """Raise UsageError for a parameter of another shape. A manifest says nothing of optimizers' parameters whose module was not given."""
    saved = {kept.spread.name: kept.spread for module in manifest.modules for kept in module if kept.spread is not None}
    changed = [(saved[now.name], now) for now in inventory.wholes() if now.name in saved]
    shapes = [f"{_own(now.name)} had shape {list(was.shape)} and has {list(now.shape)}" for was, now in changed if was.shape != now.shape]
    if shapes:
        raise UsageError(f"{path} was saved from another model: {_shown(shapes)}")
    casts = [f"{_own(now.name)} from {was.dtype} to {now.dtype}" for was, now in changed if was.dtype != now.dtype]
    if casts and log_casts:
        log.warning("%s was saved from a model with other dtypes, and its values are converted: %s", path, _shown(casts))


def _difference(saved: dict[str, int], now: dict[str, int]) -> str:
    names = sorted(name for name in {*saved, *now} if saved.get(name) != now.get(name))
    return _shown([f"{_own(name)} had {saved.get(name, 'no')} elements and has {now.get(name, 'none')}" for name in names])


def _hint(saved: Mapping[str, int], now: Mapping[str, int]) -> str:
    """What to do if a model differs from itself."""
    was, is_now = ({name.replace(_COMPILED, "") for name in names} for names in (saved, now))
    if saved.keys() == now.keys() or was != is_now:
        return ""
    return f"; torch.compile(module) puts {_COMPILED!r} into the names of parameters: compile with module.compile(), which keeps them"


def _shown(phrases: Sequence[str]) -> str:
    return ", ".join(phrases[:_NAMED]) + (f", and {len(phrases) - _NAMED} more" if len(phrases) > _NAMED else "")


def _own(name: str) -> str:
    """A parameter's name in its model."""
    return name.partition("/")[2]
