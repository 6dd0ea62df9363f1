"""`Saves`: the checkpoints of a training that also keeps its state in memory."""

import asyncio
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardnet.backend import Backend
from shardnet.checkpoint import Checkpoints, Loaded
from shardnet.checkpoint.folder import Folder
from shardnet.errors import CheckpointError, EndNotSaved, UsageError

log = logging.getLogger(__name__)


def passes(before: int, step: int, every: int) -> bool:
    """Whether there is a multiple of `every` after `before` and up to `step`: programs may count steps by more than one."""
    return step // every > before // every


@dataclass(frozen=True, slots=True)
class Saving:
    """The wanted checkpoints: where, how often, and how many are kept."""

    folder: Path
    every: int = 1000  # steps
    keep: int = 2

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 1:
            raise UsageError(f"save_every and keep must be at least 1, got {self.every} and {self.keep}")


class Saves:
    """Begins checkpoints, and finds the last one; lives through all epochs. Does nothing if no checkpoints are wanted.

    `load`, `save` and `make_good` are collectives.
    """

    def __init__(self, saving: Saving | None) -> None:
        # As of now: an epoch may begin when the program has changed its directory.
        self._saving = None if saving is None else replace(saving, folder=saving.folder.absolute())
        self._checkpoints: Checkpoints | None = None  # of this epoch
        self._is_first = False  # whether this is rank 0
        self._step = -1  # of the checkpoint that was begun last
        self._failure: CheckpointError | None = None  # why that checkpoint failed

    @property
    def wanted(self) -> bool:
        return self._saving is not None

    @property
    def result(self) -> str:
        """The outcome of the last checkpoint, in words; ask after `settle`."""
        assert self._saving is not None
        return f"step {self._step} is saved in {self._saving.folder}" if self._failure is None else str(self._failure)

    def begin_epoch(self, backend: Backend, *things: object) -> None:
        """Raises UsageError for a thing that cannot be kept."""
        if self._saving is not None:
            self._is_first = backend.rank == 0
            self._checkpoints = Checkpoints(backend, self._saving.folder, *things, keep=self._saving.keep)

    async def load(self) -> Loaded | None:
        """Load the last checkpoint into everything; None if there is none. Raises as `Checkpoints.load` does."""
        if self._checkpoints is None:
            return None
        if self._is_first:
            await asyncio.to_thread(self._try_folder)
        return await self._checkpoints.load()

    def _try_folder(self) -> None:
        """Log now if nothing can be written to the folder: hours later would be too late."""
        assert self._saving is not None
        try:
            self._saving.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._saving.folder):
                pass
        except OSError as error:
            log.error("checkpoints cannot be written to %s: %s; the training goes on without them", self._saving.folder, error.strerror)

    def go_on_from(self, loaded: Loaded | None) -> None:
        """From now on take what `load` has found for the last checkpoint, and forget how others have failed: the same on all ranks,
        whenever they came."""
        self._step, self._failure = -1 if loaded is None else loaded.step, None

    @property
    def without(self) -> str:
        """What to do if neither memory nor a checkpoint has a state, in words."""
        if self._saving is None:
            return "start the training again; give elastic.run() a folder for checkpoints, so that next time it can go on from the last one"
        return f"{self._saving.folder} has no checkpoint yet, so start the training again"

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._checkpoints is not None and self._checkpoints.is_saving

    def hurry(self) -> None:
        """Have the checkpoint that is being written, if any, done soon: somebody waits for it."""
        if self._checkpoints is not None:
            self._checkpoints.hurry()

    def is_due(self, before: int, step: int) -> bool:
        """Whether a checkpoint is due between the steps of two successive commits."""
        return self._saving is not None and passes(before, step, self._saving.every)

    async def save(self, step: int, values: Mapping[str, Any]) -> None:
        """Begin a checkpoint, if this step has none. Errors are logged, except for a value that no file can hold: UsageError."""
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
        """Begin a checkpoint of the step after which an epoch goes on, if one has been due since the last complete one: the end of the
        epoch before may have interrupted it, or have left it to this one."""
        if self._checkpoints is not None and self.is_due(await self._checkpoints.latest() or 0, step):
            await self.save(step, values)

    async def settle(self, within_s: float | None = None) -> None:
        """Wait for the checkpoint that is being written, whether it succeeds or not; or for `within_s` only, which may be over on some
        ranks and not on others."""
        if self._checkpoints is not None:
            try:
                async with asyncio.timeout(within_s) as limit:
                    await self._checkpoints.wait()
            except CheckpointError as error:
                self._note(error)
            except TimeoutError:
                if not limit.expired():
                    raise  # it is a CollectiveTimeout
                if self._is_first:
                    log.warning("the checkpoint of step %d is still being written: those that leave do not wait for it", self._step)

    async def saved(self) -> None:
        """Wait until the checkpoint that was begun last, if any, is complete. Raises CheckpointError on all ranks if writing it failed."""
        await self.settle()
        if self._failure is not None:
            raise self._failure

    async def end_error(self, step: int) -> EndNotSaved | None:
        """The error for a training that is over after this step, if the checkpoint that was begun last failed; ask after `settle`."""
        if self._failure is None:
            return None
        return EndNotSaved(f"the training is over, at step {step}, but {self._failure}; {await self._last_good()}")

    async def legacy(self) -> str:
        """What is left of a training that all workers leave, in words; ask after `settle`."""
        if self._saving is None:
            return "nothing of it is saved: give elastic.run() a folder for checkpoints, so that a job that is started again can go on"
        return self.result if self._failure is None else f"{self._failure}; {await self._last_good()}"

    async def _last_good(self) -> str:
        """After a failure: what there is, and what to do, in words."""
        assert self._saving is not None
        folder, again = self._saving.folder, "see that the folder can be written, then start the job again"
        try:
            steps = await asyncio.to_thread(Folder(folder, self._saving.keep).steps)
        except OSError as error:
            return f"{folder} cannot be read either ({error.strerror}): {again}"
        if not steps:
            return f"{folder} has no good one: {again}, from the beginning"
        return f"the last good one in {folder} is of step {steps[0]}: {again}, which does the steps after it once more"

    async def abandon(self) -> None:
        """Give up the checkpoint that is being written, if any: its epoch is over."""
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            await checkpoints.abandon()

    def _note(self, error: CheckpointError) -> None:
        self._failure = error
        if self._is_first:  # all ranks have the same error
            log.error("%s; the training does not end because of this", error)  # nor go on, if it is over anyway
