"""`Folder`: the checkpoints of one training.

[Note: whole or not at all] The files of a checkpoint are written into a folder that nobody takes for one. When all are on the disk
the manifest is, and then the folder gets its name, which is one step for whoever looks, also after a power cut. What died before that
is swept away when the next one begins. Removing goes the other way: first it loses its name.
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
    """On a file system that all ranks see. Blocks; nothing here is safe for two trainings at once."""

    def __init__(self, path: Path, keep: int) -> None:
        """keep: so many checkpoints, the latest; older ones are removed."""
        self.path = path
        self._keep = keep

    def steps(self) -> list[int]:
        """Of the checkpoints that are there, the latest first."""
        found = [int(match[1]) for path in self.path.glob("step-*") if (match := _STEP.fullmatch(path.name)) and self._is_one(path)]
        return sorted(found, reverse=True)

    def of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        return self.path / f"step-{step:08d}"

    def unfinished(self, checkpoint: str) -> Path:
        """Where the one with that id is while it is written."""
        return self.path / f"{_UNFINISHED}{checkpoint}"

    def begin(self, checkpoint: str) -> None:
        """Make room for a checkpoint. Raises OSError."""
        self.sweep()
        self.unfinished(checkpoint).mkdir(parents=True)

    def commit(self, found: Manifest) -> None:
        """Make it one, and remove those that are too many. Raises OSError."""
        unfinished, final = self.unfinished(found.id), self.of(found.step)
        found.write(unfinished)
        _sync(unfinished)
        if final.exists():  # of a training that went back to an earlier one and came here again
            self._remove(final)
        unfinished.rename(final)
        _sync(self.path)
        for step in self.steps()[self._keep :]:
            self._remove(self.of(step))

    def abandon(self, checkpoint: str) -> None:
        """Remove what there is of one that is not finished."""
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
    """Have the disk know the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
