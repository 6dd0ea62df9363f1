"""`Checkpoints`: saving and loading a training's state, with all ranks.

[Note: the parts of a save] First the ranks agree on what is saved, and each copies what it must write: only for this the training waits.
Then each rank writes its file and tells the others whether that succeeded; if it did on all ranks, rank 0 makes the files a checkpoint
([Note: whole or not at all] in folder.py). So whenever a rank dies, this checkpoint or the one before exists. The messages of a save use
a group of their own, so that the training's collectives may come in between in any order.

[Note: what fails on one rank] Whatever a rank does by itself between two messages may fail on this rank alone, for any reason: a full
disk, too little memory, a scheduler's own `state_dict`. `_on_all` tells the others, which would otherwise wait for this rank for as long
as a disk may take.
"""

import asyncio
import logging
import operator
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from crc32c import crc32c

from shardnet.backend import Backend
from shardnet.backend.gather import gather_json
from shardnet.checkpoint.blocks import checksums
from shardnet.checkpoint.duties import writers
from shardnet.checkpoint.folder import Folder
from shardnet.checkpoint.idle_thread import Leisure, in_idle_thread
from shardnet.checkpoint.manifest import Manifest
from shardnet.checkpoint.rank_file import FileEntry, write_rank_file
from shardnet.checkpoint.reading import Reading, read
from shardnet.errors import CheckpointError, ClosedError, CollectiveError, ShardnetError, StateError, UsageError
from shardnet.state import Inventory, Piece, Snapshot, Span, random_state, set_random_state
from shardnet.unbroken import unbroken

log = logging.getLogger(__name__)
DISK_S = 24 * 3600.0  # a disk may take its time; a dead rank is noticed in any case
_ONE_LOOP = (
    "files are written on the loop of the save, so await all calls of these Checkpoints on one loop; from another thread, "
    "asyncio.run_coroutine_threadsafe(checkpoints.save(step), loop).result() does so (asyncio.run makes a loop, and ends it)"
)
_ADVICE = "await Checkpoints.wait() before the cluster closes, to end with a checkpoint"


@dataclass(frozen=True, slots=True)
class Loaded:
    """Where a training stands after `Checkpoints.load`."""

    step: int
    values: dict[str, Any]
    path: Path


class Checkpoints:
    """Checkpoints of what one training has, in one folder, for the ranks of one backend. All calls belong on one event loop; on another one
    than that of the save before they raise StateError."""

    def __init__(self, backend: Backend, folder: str | os.PathLike[str], *things: object, keep: int = 2) -> None:
        """Nothing is read or written yet. Every rank must give the same things in the same order.

        folder  on a file system that all ranks see; made if it does not exist. A relative one is within the current directory of now.
        things  sharded models, their optimizers, ZeroOptimizers and their modules, schedulers, scalers, and whatever else has a small
                `state_dict()` that is the same on all ranks
        keep    how many of the latest checkpoints are kept; older ones are removed. Those of later steps than the one that was saved last
                are put aside, see [Note: the line of a training].

        Raises UsageError for a thing that cannot be kept.
        """
        if keep < 1:
            raise UsageError(f"keep must be at least 1 checkpoint, got {keep}")
        self._backend = backend.subgroup(range(backend.world_size))
        self._folder = Folder(Path(folder).absolute(), keep)
        self._inventory = Inventory(things)
        self._snapshot = Snapshot()
        self._turn = asyncio.Lock()  # of whoever exchanges messages of these checkpoints; a save keeps it until the copy is taken
        self._writing: asyncio.Task[ShardnetError | None] | None = None
        self._leisure = Leisure()
        self._duties: dict[Span, int] = {}
        self._sizes: dict[str, int] | None = None  # of the parameters that the duties are for
        self._contents: Manifest | None = None  # of what was copied last, yet without files; on rank 0

    # --- saving

    async def save(self, step: SupportsIndex, **values: Any) -> None:
        """Save the state after a step, with values of the program's own, such as a position in the data. Returns when a copy is
        taken: the files are written in the background and become a checkpoint later; `wait` waits for that. Waits for the previous
        save first. A checkpoint of the same step, if there is one, is replaced.

        A collective. What it raises, it raises on all ranks: CheckpointError if the previous save failed or this one cannot begin,
        CollectiveMismatch if ranks save different steps, UsageError for a state or value that no file can hold, and for a step that is
        not a whole number from 0 on. If it is cancelled after the previous save has ended, it has 0.25 s to take the copy, and the
        checkpoint is still written; if that is not enough, this rank leaves the others, which lose it.
        """
        number = _number(step)
        async with self._turn:
            await self.wait()
            await unbroken(self._save(number, values), f"a save of step {number}", self._backend.abort)

    async def _save(self, step: int, values: dict[str, Any]) -> None:
        made = secrets.token_hex(8)  # rank 0's is the new checkpoint's id
        what = f"the checkpoint of step {step} cannot be written"
        try:
            checkpoint: str = (await self._on_all(what, self._make_room, made, label=f"checkpoint of step {step}", timeout_s=None))[0]
            await self._copy(f"the state of step {step} cannot be saved", checkpoint, step, values)
        except BaseException:
            await asyncio.to_thread(self._remove, made)
            raise
        self._leisure = Leisure()
        self._writing = asyncio.create_task(self._write(step, checkpoint), name=f"checkpoint of step {step}")

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return self._writing is not None and not self._writing.done()

    def hurry(self) -> None:
        """Have the save that is under way no longer leave the processor to the training."""
        self._leisure.end()

    async def wait(self) -> None:
        """Wait until the save that is under way has ended; from now on it no longer leaves the processor to the training. Raises
        CheckpointError, once, if it failed, and CollectiveError if a rank was lost meanwhile. Cancelling it does not cancel the save."""
        if (writing := self._writing) is not None:
            await self._let_end()
            self._writing = None
            if (lost := writing.result()) is not None:
                raise lost

    async def _let_end(self) -> None:
        """Wait until the save that is under way has ended, but leave its outcome to `wait`."""
        if self._writing is not None:
            if self._writing.get_loop() is not asyncio.get_running_loop():
                raise StateError(f"the save before was begun on another event loop than this call; {_ONE_LOOP}")
            self._leisure.end()
            await asyncio.wait([self._writing])

    async def abandon(self) -> None:
        """Cancel the save that is under way, after a rank was lost; the files that it has written are no checkpoint."""
        if (writing := self._writing) is not None:
            self._writing = None
            self._leisure.end()
            writing.cancel()
            await asyncio.wait([writing])
            if not writing.cancelled() and (error := writing.exception()) is not None:
                log.info("a checkpoint was not finished: %s", error)

    def _make_room(self, checkpoint: str) -> str:
        """Make the folder of a new checkpoint, on rank 0. Returns its id."""
        if self._backend.rank == 0:
            self._folder.begin(checkpoint)
        return checkpoint

    async def _copy(self, what: str, checkpoint: str, step: int, values: dict[str, Any]) -> None:
        """Have each rank copy what it writes; work out what that is, unless the parameters are those of the last save: optimizers may
        have got some. `what` begins the message of an error."""
        sizes: dict[str, int] = {}

        def look() -> int:
            sizes.update(self._inventory.sizes())
            return _digest(self._inventory.rest())

        sums = await self._on_all(what, look)
        if sizes != self._sizes:  # on all ranks, or on none
            held = await self._on_all(what, lambda: [list(_row(span)) for span in self._inventory.wanted().values()])
            self._duties, self._sizes = writers([[Span(*row) for row in rows] for rows in held]), sizes
        await self._on_all(what, self._take, checkpoint, step, values, sums[self._backend.rank] != sums[0])

    def _take(self, checkpoint: str, step: int, values: dict[str, Any], has_own: bool) -> None:
        """Copy everything that this rank writes. Raises UsageError for what cannot be written.

        has_own  whether the buffers and modules that this rank holds whole differ from rank 0's
        """
        rank = self._backend.rank
        mine = (piece for piece, _ in self._inventory.pieces() if self._duties[piece.span] == rank)
        self._snapshot.take(
            {
                "pieces": [(*_row(piece.span), piece.state) for piece in mine],
                "rest": self._inventory.rest() if rank == 0 or has_own else None,
                "random": random_state(),
                "shared": {"step": step, "values": values, "parts": self._inventory.shared()} if rank == 0 else None,
            }
        )
        if rank == 0:
            self._contents = self._manifest(checkpoint, step)

    async def _write(self, step: int, checkpoint: str) -> ShardnetError | None:
        """See [Note: the parts of a save]. Raises CheckpointError on all ranks if it fails on any.

        Returns the error that there is no cluster any more, or not all of it: a program that ends need not wait for its last save, and
        asyncio reports what a task has raised where nobody waits for it.
        """
        try:
            await self._write_files(step, checkpoint)
        except asyncio.CancelledError:
            if self._writing is not None:  # otherwise by `abandon`
                self._say_unfinished(step, f"the program has ended; {_ADVICE}")
            raise
        except ClosedError as error:
            self._say_unfinished(step, f"{error}; {_ADVICE}")
            return error
        except CollectiveError as error:
            self._say_unfinished(step, str(error))
            return error
        return None

    def _say_unfinished(self, step: int, why: str) -> None:
        log.log(logging.INFO if self._backend.rank else logging.WARNING, "the checkpoint of step %d was not finished: %s", step, why)

    async def _write_files(self, step: int, checkpoint: str) -> None:
        what = f"the checkpoint of step {step} was not written"
        try:
            entries = await self._on_all(what, self._write_file, checkpoint, run=in_idle_thread)
            await self._on_all(what, self._commit, entries)
        except CheckpointError:
            await asyncio.to_thread(self._remove, checkpoint)
            raise
        if self._backend.rank == 0:
            log.info("checkpoint of step %d: %s", step, self._folder.of(step))

    def _write_file(self, checkpoint: str) -> dict[str, Any]:
        """Write this rank's file. Returns its FileEntry as a dict."""
        taken = self._snapshot.value()
        pieces = [Piece(Span(name, start, stop), state) for name, start, stop, state in taken.pop("pieces")]
        rank, ranks = self._backend.rank, self._backend.world_size
        folder = self._folder.unfinished(checkpoint)
        if not folder.is_dir():
            raise OSError(
                f"rank {rank} does not see {folder}, which rank 0 has made; give all ranks one folder, on a file system that they share"
            )
        path = folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"
        try:
            return asdict(write_rank_file(path, checkpoint, pieces, taken, self._leisure.rest))
        except UsageError as error:  # the call that it is about has ended
            raise CheckpointError(str(error)) from error

    def _commit(self, entries: Sequence[dict[str, Any]]) -> None:
        if self._backend.rank == 0:
            assert self._contents is not None
            self._folder.commit(replace(self._contents, files=tuple(FileEntry(**entry) for entry in entries)))

    def _manifest(self, checkpoint: str, step: int) -> Manifest:
        """What is being copied, yet without files. Only while the training waits has a module its own parameters: in between, forward
        has others in their places."""
        assert self._sizes is not None
        spans: list[list[Span]] = [[] for _ in range(self._backend.world_size)]
        for span, rank in self._duties.items():
            spans[rank].append(span)
        return Manifest(
            *(checkpoint, step, (), tuple(map(tuple, spans)), self._sizes),
            *(tuple(self._inventory.kinds), tuple(map(tuple, self._inventory.modules()))),
        )

    def _remove(self, checkpoint: str) -> None:
        if self._backend.rank == 0:
            self._folder.abandon(checkpoint)

    async def _on_all(
        self,
        what: str,
        function: Callable[..., object],
        *arguments: object,
        label: str = "outcome of a checkpoint",
        timeout_s: float | None = DISK_S,
        run: Callable[..., Awaitable[object]] = asyncio.to_thread,
    ) -> list[Any]:
        """Run the function in a thread, on all ranks. Returns what it returns on each of them, which must be what JSON can hold.
        `timeout_s` is how long ranks wait for the last one; None: as for any collective.

        A collective. If it fails on any rank, raises UsageError on all ranks if that is what the function raised, and otherwise
        CheckpointError; the message begins with `what`. See [Note: what fails on one rank].
        """
        result, problem, is_misuse = None, None, False
        try:
            result = await run(function, *arguments)
        except (OSError, ShardnetError) as error:
            problem, is_misuse = f"rank {self._backend.rank}: {error}", isinstance(error, UsageError)
        except Exception as error:
            log.exception("%s", what)  # the only trace of where it comes from
            problem = f"rank {self._backend.rank}: {error!r}"
        told = await gather_json(self._backend, [result, problem, is_misuse], label, timeout_s=timeout_s)
        for _, problem, is_misuse in told:
            if problem is not None:
                raise (UsageError if is_misuse else CheckpointError)(f"{what}: {problem}")
        return [each[0] for each in told]

    # --- loading

    async def latest(self) -> int | None:
        """The step of the latest checkpoint, None if there is none. Waits for the save that is under way. A collective."""
        async with self._turn:
            await self._let_end()
            return next(iter(await self._steps()), None)

    async def load(self) -> Loaded | None:
        """Restore everything from the latest checkpoint that is whole; None if the folder has no checkpoint at all. Waits for the save
        that is under way. Nothing is removed or changed in the folder, so one program may load what another one is saving.

        Whatever the number of ranks and the strategy that it was saved with, each rank reads what it holds and little more, and checks
        it. If any rank finds that something is not what was written, all ranks take the checkpoint before, and the log says why. The next
        save puts what was left out aside. Random generators go on from where those of the rank of the same number were.

        A collective. Raises, on all ranks, CheckpointError if there are checkpoints but none is whole, and UsageError if they are of
        another model or of other things. The things then keep the state that they had. Also raises CheckpointError if anything else
        fails on a rank, such as memory.
        """
        async with self._turn:
            await self._let_end()
            problem = None
            for step in await self._steps():
                path = self._folder.of(step)
                reading, problem = await self._read(step, path)
                if reading is not None:
                    return await self._apply(reading, path)
                if self._backend.rank == 0:
                    log.warning("the checkpoint of step %d is skipped: %s", step, problem)
        if problem is None:
            return None
        raise CheckpointError(f"none of the checkpoints in {self._folder.path} can be used; problem of the oldest: {problem}")

    async def _steps(self) -> list[int]:
        """Which checkpoints there are, as rank 0 sees it, the latest first."""

        def look() -> list[int]:
            return self._folder.steps() if self._backend.rank == 0 else []

        what = f"the checkpoints in {self._folder.path} cannot be listed"
        steps: list[int] = (await self._on_all(what, look, label="list of checkpoints", timeout_s=None))[0]
        return steps

    async def _read(self, step: int, path: Path) -> tuple[Reading | None, str | None]:
        """What this rank needs of a checkpoint, if all ranks have found what they need; otherwise why not."""
        found: list[Reading] = []

        def look() -> str | None:
            try:
                found.append(read(path, self._inventory, self._backend.rank))
            except CheckpointError as error:
                return f"rank {self._backend.rank}: {error}"
            return None

        problem = _first(await self._on_all(f"the checkpoint of step {step} cannot be loaded", look))
        return (None if problem is not None else found[0]), problem

    async def _apply(self, reading: Reading, path: Path) -> Loaded:
        await self._on_all(
            f"the checkpoint of step {reading.step} cannot be loaded",
            lambda: self._inventory.load(reading.pieces, reading.rest, reading.shared["parts"]),
        )
        if reading.random is not None:
            set_random_state(reading.random)
        return Loaded(reading.step, reading.shared["values"], path)


def _number(step: SupportsIndex) -> int:
    """A step as an int. Raises UsageError for what is none."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"the step of a checkpoint must be a whole number from 0 on, got {step!r}")
    return number


def _row(span: Span) -> tuple[str, int, int]:
    return span.name, span.start, span.stop


def _first(problems: Iterable[str | None]) -> str | None:
    return next((each for each in problems if each is not None), None)


def _digest(rest: Sequence[Mapping[str, torch.Tensor]]) -> int:
    """Equal for equal tensors."""
    value = 0
    for tensors in rest:
        for tensor in tensors.values():
            for each in checksums(tensor.cpu().contiguous()):
                value = crc32c(each.to_bytes(4), value)
    return value
