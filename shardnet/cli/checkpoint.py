"""`shardnet checkpoint`: lists checkpoints, checks whether they are whole, and exports the weights of one to a single file."""

import json
import sys
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from shardnet.cli import arguments
from shardnet.cli.grid import grid
from shardnet.cli.units import short_bytes
from shardnet.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from shardnet.checkpoint.manifest import Manifest

DESCRIPTION = """\
Look at the checkpoints of a training, without running it. DIR is the folder that was given to elastic.run(checkpoints=DIR) or to
Checkpoints, or the folder of a single checkpoint.
"""
EPILOG = """\
examples:
  shardnet checkpoint list runs/lm
  shardnet checkpoint verify runs/lm
  shardnet checkpoint export runs/lm model.safetensors
      the last one's weights, in the module's own names: module.load_state_dict(safetensors.torch.load_file("model.safetensors"))
"""


def add_to(commands: arguments.Commands) -> None:
    parser = commands.add_parser(
        "checkpoint", help="list and verify checkpoints, and export one's weights", description=DESCRIPTION, epilog=EPILOG
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", dest="verb", required=True)

    list_ = verbs.add_parser("list", help="list the checkpoints; the exit status is 1 if a manifest cannot be read")
    _add_folder(list_)
    list_.add_argument("--json", action="store_true", help="print JSON")
    list_.set_defaults(execute=_list)

    verify = verbs.add_parser(
        "verify", help="read all files and report any that differ from what was written; the exit status is 1 if there are any"
    )
    _add_folder(verify)
    _add_step(verify, "all")
    verify.set_defaults(execute=_verify)

    export = verbs.add_parser("export", help="write a module's weights into one safetensors file (all weights must fit into memory)")
    _add_folder(export)
    export.add_argument(
        "file", type=Path, metavar="FILE", help="file to write; an existing one is replaced, and only once the new one is complete"
    )
    _add_step(export, "the last one")
    export.add_argument(
        "--model", type=arguments.whole, metavar="N", help="number of the saved module to export, from 0; needed if there are several"
    )
    export.set_defaults(execute=_export)


def _add_folder(parser: arguments.Parser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of all checkpoints of a training, or of one checkpoint")


def _add_step(parser: arguments.Parser, default: str) -> None:
    parser.add_argument("--step", type=arguments.whole, metavar="N", help=f"the checkpoint of this step (default: {default})")


# Modules that read checkpoints import torch, so they are imported where they are used: all other commands start without it.


@dataclass(frozen=True, slots=True)
class _Found:
    """One checkpoint, as its manifest describes it."""

    path: Path
    manifest: "Manifest"

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry.size for entry in self.manifest.files)

    @property
    def saved(self) -> datetime:
        from shardnet.checkpoint.manifest import NAME

        return datetime.fromtimestamp((self.path / NAME).stat().st_mtime).astimezone()


def _list(options: arguments.Arguments) -> int:
    from shardnet.checkpoint.manifest import Manifest

    found, unreadable = [], 0
    for path in _paths(options.folder, None):
        try:
            found.append(_Found(path, Manifest.read(path)))
        except CheckpointError as error:  # go on with the others
            unreadable += 1
            _complain(error)
    if options.json:
        print(json.dumps([_as_json(each) for each in found], indent=2))
    elif found:
        print(_table(found))
    return 1 if unreadable else 0


def _table(found: list[_Found]) -> str:
    rows = [
        (
            str(each.manifest.step),
            f"{each.saved:%Y-%m-%d %H:%M:%S}",
            str(len(each.manifest.files)),
            short_bytes(each.size),
            ", ".join(each.manifest.kinds),
        )
        for each in found
    ]
    return grid(("step", "saved", "ranks", "size", "contents"), rows, ("saved", "contents"))


def _as_json(found: _Found) -> dict[str, object]:
    manifest = found.manifest
    return {
        "path": str(found.path),
        "step": manifest.step,
        "saved": found.saved.isoformat(timespec="seconds"),
        "ranks": len(manifest.files),
        "bytes": found.size,
        "things": list(manifest.kinds),
        "parameters": sum(manifest.sizes.values()),
    }


def _verify(options: arguments.Arguments) -> int:
    from shardnet.checkpoint.looking import problems

    broken = 0
    for path in _paths(options.folder, options.step):
        found = []
        for problem in problems(path):
            found.append(problem)
            if problem is not None:
                _complain(problem)
        is_whole = not any(found)
        broken += not is_whole
        files = "1 file" if len(found) == 2 else f"{len(found) - 1} files"
        print(f"{path}: {f'whole ({files})' if is_whole else 'broken'}", flush=True)  # each at once: every one takes a while
    return 1 if broken else 0


def _export(options: arguments.Arguments) -> int:
    from shardnet.checkpoint import write_weights
    from shardnet.checkpoint.looking import whole_weights

    path = _paths(options.folder, options.step)[0]
    weights = whole_weights(path, options.model)
    write_weights(options.file, weights)
    print(f"{options.file}: {len(weights)} tensors, {short_bytes(options.file.stat().st_size)}, of {path}")
    return 0


def _paths(folder: Path, step: int | None) -> list[Path]:
    """The checkpoints of a folder, the latest first. Raises CheckpointError if there is none, UsageError for a step that is not there, or
    for a step if the folder itself is a checkpoint."""
    from shardnet.checkpoint.folder import Folder
    from shardnet.checkpoint.manifest import NAME

    if (folder / NAME).is_file():
        if step is not None:
            raise UsageError(f"{folder} is one checkpoint; leave --step out")
        return [folder]
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    found = Folder(folder, 1)
    steps = found.steps()
    if not steps:
        raise CheckpointError(f"{folder} has no checkpoints")
    if step is not None and step not in steps:
        raise UsageError(f"{folder} has no checkpoint of step {step}; choose one of {', '.join(map(str, steps))}")
    return [found.of(each) for each in steps if step in (None, each)]


def _complain(problem: object) -> None:
    print(f"shardnet checkpoint: {problem}", file=sys.stderr)
