"""`Folder`: the checkpoints of one training.

[Note: whole or not at all] The files of a checkpoint are written into a folder that nobody takes for a checkpoint. When all of them
are on the disk, the manifest is written, and then the folder is renamed to its final name. The rename is atomic for any reader, also
after a power cut. Whatever did not get that far is removed when the next checkpoint begins. Removing a checkpoint goes the other way:
first the folder loses its name. A checkpoint of a step that has one already takes two renames: the old one goes aside under a name that
readers know, so that it is found until the new one is there.

[Note: the line of a training] The checkpoints of a training are in the order of their steps, so the highest step is the latest. A save of
a lower step begins another line: of a training that went back because the later ones cannot be read, or that began anew in the folder.
The later ones are then put aside under a name that no reader knows. If they kept their names, each load would prefer them, and they
would count among the latest that are kept. They are not removed, since this room cannot know whether somebody still needs them.
"""

import itertools
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from shardnet.checkpoint import manifest
from shardnet.checkpoint.manifest import Manifest

log = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_LEFT_OUT = "left-out-"


class Folder:
    """A folder on a file system that all ranks see. Its methods block; nothing here is safe for two trainings at once, but others may read
    while one training saves."""

    def __init__(self, path: Path, keep: int) -> None:
        """keep: how many of the latest checkpoints are kept; older ones are removed."""
        self.path = path
        self._keep = keep

    def steps(self) -> list[int]:
        """The steps of the checkpoints that exist, the latest first."""
        paths = (*self.path.glob("step-*"), *self.path.glob(f"{_REPLACED}step-*"))
        matches = (_STEP.fullmatch(path.name.removeprefix(_REPLACED)) for path in paths)
        steps = {int(match[1]) for match in matches if match}
        return sorted((step for step in steps if _is_one(self.of(step))), reverse=True)

    def of(self, step: int) -> Path:
        """Where the checkpoint of a step is."""
        final, replaced = self._final(step), self._replaced(step)
        return replaced if not _is_one(final) and _is_one(replaced) else final  # in the order in which they disappear

    def unfinished(self, checkpoint: str) -> Path:
        """Where the checkpoint with this id is while it is written."""
        return self.path / f"{_UNFINISHED}{checkpoint}"

    def begin(self, checkpoint: str) -> None:
        """Make room for a checkpoint. Raises OSError."""
        self.sweep()
        self.unfinished(checkpoint).mkdir(parents=True)

    def commit(self, found: Manifest) -> None:
        """Make the files a checkpoint, remove checkpoints beyond `keep`, and put those of later steps aside
        ([Note: the line of a training]). Raises OSError; then what was there is still there."""
        unfinished, final = self.unfinished(found.id), self._final(found.step)
        found.write(unfinished)
        _sync(unfinished)
        aside = None
        if _is_one(final):
            aside = final.rename(self._replaced(found.step))
        elif os.path.lexists(final):
            aside = self._put_aside(final, "it has the name of a checkpoint, but is none")
        try:
            unfinished.rename(final)
        except OSError:
            if aside is not None:
                aside.rename(final)
            raise
        _sync(self.path)
        try:
            self._tidy(found.step)
        except OSError as error:  # the checkpoint is there all the same
            log.warning("the checkpoint of step %d is written, but others could not be removed or renamed: %s", found.step, error)

    def abandon(self, checkpoint: str) -> None:
        """Remove what exists of a checkpoint that is not finished."""
        _discard(self.unfinished(checkpoint))

    def sweep(self) -> None:
        """Remove what was left unfinished, and give a checkpoint its name back that was about to be replaced. For the training that saves;
        whoever only reads would take away what it is writing."""
        for path in self.path.glob(f"{_UNFINISHED}*"):
            _discard(path)
        for path in self.path.glob(f"{_REPLACED}*"):
            final = path.with_name(path.name.removeprefix(_REPLACED))
            if _is_one(final):
                self._remove(path)
            elif not os.path.lexists(final):
                path.rename(final)

    def _tidy(self, newest: int) -> None:
        """Remove or put aside what the newest checkpoint has made superfluous."""
        if os.path.lexists(replaced := self._replaced(newest)):
            self._remove(replaced)
        steps = self.steps()
        for step in (step for step in steps if step > newest):
            self._put_aside(self.of(step), f"step {newest} was saved after it")
        for step in [step for step in steps if step < newest][self._keep - 1 :]:
            self._remove(self.of(step))

    def _final(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _replaced(self, step: int) -> Path:
        """Where a checkpoint is while another one of its step takes its place."""
        return self.path / f"{_REPLACED}{self._final(step).name}"

    def _put_aside(self, path: Path, why: str) -> Path:
        """Give it a name that no reader knows, and log that. Returns its new path."""
        names = (f"{_LEFT_OUT}{path.name}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        aside = path.rename(next(free for name in names if not os.path.lexists(free := path.with_name(name))))
        log.warning("%s is not used from now on, and was renamed to %s: %s", path, aside.name, why)
        return aside

    def _remove(self, path: Path) -> None:
        nameless = self.unfinished(path.name)
        _discard(nameless)
        path.rename(nameless)
        _discard(nameless)


def _is_one(path: Path) -> bool:
    """Whether this is a checkpoint."""
    return (path / manifest.NAME).is_file()


def _discard(path: Path) -> None:
    """Remove it as far as it can be removed; what a symbolic link points to stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync(path: Path) -> None:
    """Have the names in a folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
