"""Checkpoints as files, without a training: whether one is whole, and what its modules' weights are."""

from collections.abc import Iterator
from pathlib import Path

import torch

from shardnet.checkpoint.manifest import Manifest
from shardnet.checkpoint.rank_file import RankFile
from shardnet.checkpoint.reading import Files, check_covered, read_piece
from shardnet.errors import CheckpointError, UsageError
from shardnet.state import VALUES, Span

Tensor = torch.Tensor


def problems(path: Path) -> Iterator[str | None]:
    """Read all of a checkpoint. Yields what is wrong with the manifest and then with each file, None if nothing is."""
    try:
        manifest = Manifest.read(path)
        check_covered(path, manifest, manifest.holders())
    except CheckpointError as error:
        yield str(error)
        return
    yield None
    for entry, spans in zip(manifest.files, manifest.spans, strict=True):
        try:
            RankFile(path, entry, manifest.id).check(spans)
        except CheckpointError as error:
            yield str(error)
        else:
            yield None


def whole_weights(path: Path, model: int | None = None) -> dict[str, Tensor]:
    """Parameters and buffers of one of the modules that were saved, whole and under the module's own names, as its state_dict has them;
    copied into memory, except what lies in one file.

    model  which of the modules that were given to `Checkpoints` or `State.resume`, from 0; may be left out if there was only one

    Raises CheckpointError for anything but what was written, and UsageError if there is no such module, and for a tensor of the state_dict
    that a hook of the module has computed, since no file has it.
    """
    manifest = Manifest.read(path)
    number = _number(manifest, path, model)
    computed = [kept.name for kept in manifest.modules[number] if kept.spread is None and kept.own is None]
    if computed:
        raise UsageError(
            f"{path} lacks {', '.join(computed)}: a hook of the module's state_dict() computed them from what was saved. Load the "
            "checkpoint into the model, and take its full_state_dict()"
        )
    holders = manifest.holders()
    check_covered(path, manifest, holders)
    files = Files(path, manifest)
    rest = files[0].value("rest")
    found: dict[str, Tensor] = {}
    for name, spread, own in manifest.modules[number]:
        if spread is None:
            found[name] = rest[number][own]
        elif numel := manifest.sizes[spread.name]:
            piece = read_piece(Span(spread.name, 0, numel), holders[spread.name], files, only=VALUES)
            found[name] = piece.state[VALUES].reshape(spread.shape)
        else:  # no file has any of it
            found[name] = torch.empty(spread.shape, dtype=getattr(torch, spread.dtype), device="cpu")
    return found


def _number(manifest: Manifest, path: Path, model: int | None) -> int:
    """The number of a module among all things."""
    modules = [number for number, kept in enumerate(manifest.modules) if kept]
    if len(modules) == 1 and model is None:
        return modules[0]
    if not modules:
        raise UsageError(f"{path} has no module, so there are no weights to export")
    if model is not None and 0 <= model < len(modules):
        return modules[model]
    count = f"{len(modules)} module{'' if len(modules) == 1 else 's'}"
    raise UsageError(f"{path} has {count}" + (", say which: --model 0 is the first" if model is None else f"; there is no number {model}"))
