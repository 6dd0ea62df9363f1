"""`Saves`: the checkpoints of a training that keeps its state in memory, too."""

import asyncio
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints, Loaded
from shardnet.errors import CheckpointError, UsageError

log = logging.getLogger(__name__)


def passes(before: int, step: int, every: int) -> bool:
    """Whether a multiple of `every` lies behind `before` and not behind `step`: programs may count steps otherwise than by one."""
    return step // every > before // every


@dataclass(frozen=True, slots=True)
class Saving:
    """What is wanted of checkpoints: where, how often, and how many are kept."""

    folder: Path
    every: int = 1000  # steps
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise UsageError(f"save_every and keep must be at least 1, got {self.every} and {self.keep}")


class Saves:
    """Begins checkpoints where they are wanted, and finds the last one; lives through all epochs. Does nothing where none are wanted.

    `load`, `save` and `make_good` are collectives.
    """

    def __init__(self, saving: Saving | None) -> None:
        self._saving = saving
        self._checkpoints: Checkpoints | None = None  # of this epoch
        self._is_first = False  # of the ranks
        self._step = -1  # of the one that was begun last
        self._failure: CheckpointError | None = None  # why it is none

    @property
    def wanted(self) -> bool:
        return self._saving is not None

    @property
    def succeeded(self) -> bool:
        """Whether the last one is there; after `settle`."""
        return self._checkpoints is not None and self._failure is None

    @property
    def result(self) -> str:
        """What came of the last one, in words; after `settle`."""
        assert self._saving is not None
        return f"step {self._step} is saved in {self._saving.folder}" if self._failure is None else str(self._failure)

    def begin_epoch(self, backend: Backend, *things: object) -> None:
        """Raises UsageError for a thing that cannot be kept."""
        if self._saving is not None:
            self._is_first = backend.rank == 0
            self._checkpoints = Checkpoints(backend, self._saving.folder, *things, keep=self._saving.keep)

    async def load(self) -> Loaded | None:
        """Bring everything to where the last one has it; None if there is none. Raises as `Checkpoints.load` does."""
        if self._checkpoints is None:
            return None
        if self._is_first:
            await asyncio.to_thread(self._try_folder)
        return await self._checkpoints.load()

    def _try_folder(self) -> None:
        """Say now what would keep all checkpoints from being written: hours later is late."""
        assert self._saving is not None
        try:
            self._saving.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._saving.folder):
                pass
        except OSError as error:
            log.error("checkpoints cannot be written to %s: %s; the training goes on without", self._saving.folder, error.strerror)

    def go_on_from(self, loaded: Loaded | None) -> None:
        """What `load` has found is the last one now: the same on all ranks, whoever came when."""
        self._step = -1 if loaded is None else loaded.step

    @property
    def without(self) -> str:
        """What to do if there is neither a state in memory nor one that `load` has found, in words."""
        if self._saving is None:
            return "start the training again; from a folder of checkpoints, had elastic.run() one, it would have gone on by itself"
        return f"start the training again, for {self._saving.folder} has no checkpoint yet"

    def is_due(self, before: int, step: int) -> bool:
        """Whether the steps of two commits, one behind the other, make one due."""
        return self._saving is not None and passes(before, step, self._saving.every)

    async def save(self, step: int, values: Mapping[str, Any]) -> None:
        """Begin one, if this step has none. What goes wrong is logged, but for a value that no file can hold: UsageError."""
        if self._checkpoints is None or step == self._step:
            return
        await self.settle()
        try:
            await self._checkpoints.save(step, **values)
        except CheckpointError as error:
            self._note(error)
        else:
            self._step, self._failure = step, None

    async def make_good(self, step: int, values: Mapping[str, Any]) -> None:
        """Begin one of the step behind which an epoch goes on, if one has been due since the last that is there: the end of the epoch
        before may have kept it from becoming one."""
        if self._checkpoints is not None and self.is_due(await self._checkpoints.latest() or 0, step):
            await self.save(step, values)

    async def settle(self) -> None:
        """Wait for the one that is being written, whether it succeeds or not."""
        if self._checkpoints is not None:
            try:
                await self._checkpoints.wait()
            except CheckpointError as error:
                self._note(error)

    async def saved(self) -> None:
        """Wait until the one that was begun last, if any, is one. Raises CheckpointError on all ranks if it could not be written."""
        await self.settle()
        if self._failure is not None:
            raise self._failure

    async def abandon(self) -> None:
        """Give up the one that is being written, if any: its epoch is over."""
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            await checkpoints.abandon()

    def _note(self, error: CheckpointError) -> None:
        self._failure = error
        if self._is_first:  # all have the same one
            log.error("%s; the training goes on", error)
