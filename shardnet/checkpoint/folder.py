"""`Folder`: the checkpoints of one training.

[Note: whole or not at all] The files of a checkpoint are written into a folder that nobody takes for a checkpoint. When all of them
are on the disk, the manifest is written, and then the folder is renamed to its final name. The rename is atomic for any reader, also
after a power cut. Whatever did not get that far is removed when the next checkpoint begins. Removing a checkpoint goes the other way:
first the folder loses its name.
"""

import os
import re
import shutil
from pathlib import Path

from shardnet.checkpoint import manifest
from shardnet.checkpoint.manifest import Manifest

_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished-"


class Folder:
    """A folder on a file system that all ranks see. Its methods block; nothing here is safe for two trainings at once."""

    def __init__(self, path: Path, keep: int) -> None:
        """keep: how many of the latest checkpoints are kept; older ones are removed."""
        self.path = path
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps of the checkpoints that exist, the latest first."""
        found = [int(match[1]) for path in self.path.glob("step-*") if (match := _STEP.fullmatch(path.name)) and self._is_one(path)]
        return sorted(found, reverse=True)

    def of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.path / f"step-{step:08d}"

    def unfinished(self, checkpoint: str) -> Path:
        """Where the checkpoint with this id is while it is written."""
        return self.path / f"{_UNFINISHED}{checkpoint}"

    def begin(self, checkpoint: str) -> None:
        """Make room for a checkpoint. Raises OSError."""
        self.sweep()
        self.unfinished(checkpoint).mkdir(parents=True)

    def commit(self, found: Manifest) -> None:
        """Make the files a checkpoint, and remove checkpoints beyond `keep`. Raises OSError."""
        unfinished, final = self.unfinished(found.id), self.of(found.step)
        found.write(unfinished)
        _sync(unfinished)
        if final.exists():  # left by a training that went back to an earlier checkpoint and reached this step again
            self._remove(final)
        unfinished.rename(final)
        _sync(self.path)
        for step in self.steps()[self._keep :]:
            self._remove(self.of(step))

    def abandon(self, checkpoint: str) -> None:
        """Remove what exists of a checkpoint that is not finished."""
        shutil.rmtree(self.unfinished(checkpoint), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what was left unfinished."""
        for path in self.path.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        nameless = self.unfinished(path.name)
        shutil.rmtree(nameless, ignore_errors=True)
        path.rename(nameless)
        shutil.rmtree(nameless, ignore_errors=True)

    @staticmethod
    def _is_one(path: Path) -> bool:
        return (path / manifest.NAME).is_file()


def _sync(path: Path) -> None:
    """Have the names in a folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
