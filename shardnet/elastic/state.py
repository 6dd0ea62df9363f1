"""`State`: the state that a training must not lose."""

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

from shardnet.backend import Backend
from shardnet.backend.gather import gather_json
from shardnet.checkpoint import Loaded
from shardnet.elastic.choice import Choice, Offer, choose, structure_of
from shardnet.elastic.copying import Copying, Waiting
from shardnet.elastic.generation import Generation, Mark, plain
from shardnet.elastic.leavers import Leavers
from shardnet.elastic.moving import give_all, move
from shardnet.elastic.saves import Saves, Saving, passes
from shardnet.elastic.told import Told
from shardnet.errors import CollectiveError, EndNotSaved, Preempted, ShardnetError, StateError, StateLost, UsageError, WorldChanges
from shardnet.state import Inventory, Piece, Span, random_state, set_random_state
from shardnet.training import Cluster, Departure
from shardnet.unbroken import unbroken
from shardnet.whole import whole

log = logging.getLogger(__name__)
LEAVE_S = 20.0  # the longest wait for the checkpoint of workers that leave while others stay: who has sent SIGTERM may kill after 30 s


@dataclass(frozen=True, slots=True)
class Ended:
    """How an epoch has ended, as one rank saw it."""

    at_s: float  # of time.perf_counter
    why: str


class State:
    """The state of a training as of its last committed step, in the memory of its workers; lives through all epochs of a cluster.

    `resume` says what belongs to it, at the beginning of an epoch; `commit` makes a step safe. `values` belong to the program,
    such as a position in the data.

    Each rank keeps two copies of what it holds, one as of the last commit and one for the commit that is being made, and two copies of
    what one other rank holds: four times its parameters and optimizer state, in host memory. Of state that several ranks hold anyway
    (NO_SHARD, HYBRID_SHARD) it keeps two copies. When ranks leave, others keep further copies until the next epoch has its state.
    """

    def __init__(self, cluster: Cluster, *, every: SupportsIndex = 1, saving: Saving | None = None) -> None:
        """`every`: the number of steps from one commit to the next."""
        self.every = whole(every, "every")
        if self.every < 1:
            raise UsageError(f"every must be at least 1 step, got {every}")
        self._saves = Saves(saving)
        self.step = 0
        self.values: dict[str, Any] = {}
        self.resumed = False
        self.settled = False  # whether a step was done in this epoch
        self.commit_s = 0.0  # how long the last commit took
        self._cluster = cluster
        self._committed, self._next = Generation(Mark(0, 0)), Generation(Mark(0, 0))
        self._inventory: Inventory | None = None
        self._copying: Copying | None = None
        self._departure = Departure.current()
        self._leavers: Leavers | None = None  # set during the steps of an epoch, if ranks can leave it without a loss
        self._structure = ""
        self._ended: Ended | None = None  # how the epoch before has ended, until that is logged
        self._brings_copies = False  # into the next epoch, or into this one before `resume`: others may depend on what this worker has

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    @property
    def nbytes(self) -> int:
        """The memory that the copies take, in bytes."""
        return self._committed.nbytes + self._next.nbytes

    @property
    def has_copies(self) -> bool:
        """Whether this worker has copies of an earlier step to offer; a newcomer has none."""
        return any(self._generations())

    @property
    def can_part(self) -> bool:
        """Whether this worker could leave after the next commits without a loss, but perhaps not before."""
        return self._leavers is not None or self._brings_copies

    def begin_epoch(self) -> None:
        """An epoch after the first has begun: until its first commit, this worker may have the only copy of what a lost one held."""
        self._brings_copies = self.has_copies

    def end_epoch(self, why: str) -> None:
        """Let go of the models and optimizers, because the program makes new ones; the copies stay."""
        self._ended = Ended(time.perf_counter(), why)
        self.settled = self._brings_copies = False
        self._inventory = self._copying = self._leavers = None

    async def saved(self) -> None:
        """Wait until the checkpoint that was begun last, if any, is complete. Raises CheckpointError on all ranks if writing it failed."""
        await self._saves.saved()

    async def end_error(self) -> EndNotSaved | None:
        """The error that must follow if the training is over and its last checkpoint failed; ask after `saved`."""
        return await self._saves.end_error(self.step)

    async def abandon(self) -> None:
        """Give up the checkpoint that is being written, if any: its epoch is over."""
        await self._saves.abandon()

    # --- the beginning of an epoch

    async def resume(self, *things: object, **values: Any) -> None:
        """Say what must be kept, and bring it to where the training stands; call it when everything is made, before the first step.

        things  sharded models, their optimizers, ZeroOptimizers and their modules, schedulers, scalers, and whatever else has a small
                `state_dict()` that is the same on all ranks; the same ones in the same order in each epoch
        values  the initial `values`

        Afterwards `step` and `values` are those of the last committed step, which is committed again for the ranks of this epoch; those of
        the last checkpoint if parts of the committed step are lost; or 0 and the given ones if there is no checkpoint either. `resumed` is
        false in this last case. On ranks that were there before, random generators continue; on new ranks they stay as the program has set
        them. Buffers and ignored modules are each rank's own; new ranks get those of the first rank that was there.

        A collective. Raises StateLost on all ranks if more workers are gone than there were copies and there is no checkpoint,
        CheckpointError if there are checkpoints but none can be used, and UsageError for a thing that cannot be kept or that was not there
        in the epoch before, and for a value named `step`.
        """
        if "step" in values:
            raise UsageError("a value cannot be named 'step': State.step is the number of steps that are done; give it another name")
        self._inventory = inventory = Inventory(things)
        backend = self._cluster.backend
        everyone = backend.subgroup(range(backend.world_size))
        sizes = inventory.sizes()
        told = await Told.by_all(everyone, self._generations(), inventory.wanted(), was_there=self._ended is not None)
        self._copying = Copying(everyone, told.wanted)
        self._saves.begin_epoch(backend, *things)
        try:
            choice, loaded = await self._choose(told.offers, sizes)
        except CollectiveError:
            raise  # a rank is lost, and the others go on in another epoch
        except ShardnetError:
            await backend.aclose()  # with goodbyes: all ranks end here, and slower ones must not take the others for lost
            raise
        self._structure = structure_of(sizes)
        self.resumed = choice is not None or loaded is not None
        self._saves.go_on_from(loaded)
        if loaded is not None:
            self.step, self.values = loaded.step, loaded.values
            self._cluster.telemetry.reach(self.step)
        elif choice is None:
            self.step, self.values = 0, dict(values)
            if self._cluster.topology.epoch > 1 and self._cluster.rank == 0:
                log.warning("epoch %d begins at step 0: no worker has the state of an earlier epoch", self._cluster.topology.epoch)
        else:
            await self._load(choice, told.wanted, sizes, everyone)
        if self._cluster.elastic:
            await self._commit(Mark(self._cluster.topology.epoch, self.step))
        if self._cluster.elastic or self._saves.wanted:
            self._leavers = Leavers(everyone, self._departure)  # from now on even a newcomer has what others may depend on
        if choice is not None:
            await self._saves.make_good(self.step, self.values)
        self._brings_copies = False
        self._say_so(told.witness)

    async def _choose(self, offers: Sequence[Offer], sizes: dict[str, int]) -> tuple[Choice | None, Loaded | None]:
        """Choose the state that ranks have in memory; otherwise load the last checkpoint; or neither. Raises as `resume` does."""
        lost: StateLost | None = None
        try:
            if (choice := choose(offers, sizes)) is not None:
                return choice, None
        except StateLost as error:
            lost = error
        loaded = await self._saves.load()
        if loaded is None and lost is not None:
            raise StateLost(f"{lost}; {self._saves.without}")
        if loaded is not None and self._cluster.rank == 0:
            log.warning(
                "epoch %d: it goes on behind step %d, from checkpoint %s%s",
                *(self._cluster.topology.epoch, loaded.step, loaded.path, f"; {lost}" if lost else ""),
            )
        return None, loaded

    def _say_so(self, witness: int | None) -> None:
        """Log one line for a changed world, on the first rank that was there before: rank 0 may be a newcomer that knows nothing of it."""
        ended, self._ended = self._ended, None
        if ended is not None and self._cluster.rank == witness:
            workers = f"{self._cluster.world_size} worker{'s' if self._cluster.world_size > 1 else ''}"
            log.warning(
                "epoch %d with %s: it goes on behind step %d, %.1f s after: %s",
                *(self._cluster.topology.epoch, workers, self.step, time.perf_counter() - ended.at_s, ended.why),
            )

    def _generations(self) -> Iterator[Generation]:
        return (each for each in (self._committed, self._next) if each.complete)

    async def _load(self, choice: Choice, wanted: Sequence[dict[str, Span]], sizes: dict[str, int], everyone: Backend) -> None:
        assert self._inventory is not None
        mine = next((each for each in self._generations() if each.mark == choice.mark), None)
        if mine is self._next:
            self._committed, self._next = self._next, self._committed
        try:
            arrived = await move(everyone, choice, wanted, [] if mine is None else mine.pieces(), sizes)
        except UsageError:
            await self._cluster.backend.aclose()  # with goodbyes, as all ranks end here
            raise
        local = None if mine is None else mine.local.value()
        leading = await give_all(everyone, choice.ranks[0], local and {"shared": local["shared"], "rest": local["rest"]})
        rest = leading["rest"] if local is None else local["rest"]
        shared = leading["shared"]
        problem = None
        try:
            self._inventory.check_kinds(shared["kinds"], "to State.resume() in the previous epoch")
            self._inventory.check(rest, shared["parts"])
        except UsageError as error:
            problem = str(error)
        if problems := [told for told in await gather_json(everyone, problem, "check that the state fits") if told is not None]:
            await self._cluster.backend.aclose()  # with goodbyes, as all ranks end here
            raise UsageError(problems[0])
        await asyncio.to_thread(self._inventory.load, arrived, rest, shared["parts"])
        self.step, self.values = choice.mark.step, shared["values"]
        self._cluster.telemetry.reach(self.step)
        if local is not None:
            set_random_state(local["random"])

    # --- steps

    async def commit(self, step: SupportsIndex, **values: Any) -> None:
        """Say that all ranks have done a step, and make the state after it safe if it is, or passes, a multiple of `every`; `values` are
        set before.

        When it returns the step is done for good: whichever worker dies from now on, the training goes on after this step. If it raises
        PeerLost, either all survivors go on after this step or none does. Waits for the copies to be exchanged. If checkpoints are wanted,
        one is begun at each multiple of `save_every`, or when a step passes one; it is written in the background, and errors are logged.

        When workers were told to leave (SIGTERM) the step is committed in any case, and saved, and they leave: their program is cancelled.
        If others stay, which have the state in memory, nobody waits longer than 20 s for that, and an earlier checkpoint that is still
        being written is finished instead. Workers that wait to join are taken in when no checkpoint is being written.

        Cancelling this call gives all ranks 0.25 s to complete it; then the step is committed, and `step` says so. If that is not enough,
        this rank leaves the epoch, and the others go on without it.

        A collective. Raises WorldChanges, which only `run` should catch, if workers wait to join or leave, Preempted if some leave
        and the job is not elastic, CollectiveMismatch if ranks commit different steps, StateError before `resume`, and UsageError for a
        step that is not a whole number or comes out of order, and for a value that cannot be kept.
        """
        if self._inventory is None:
            raise StateError("State.commit() came before State.resume(): call State.resume(model, optimizer, ...) first in each epoch")
        done = whole(step, "the step of a commit")
        if done <= self.step:
            raise UsageError(f"the step of a commit must come after step {self.step}, got {done}; commit steps in order, each once")
        is_due = self._saves.is_due(self.step, done)
        if is_due:
            await self._saves.settle()  # a disk may be slow: a rank that is cancelled here has not begun the commit
        reaching = self._reach(done, values, is_due)
        waiting, leaving = await unbroken(reaching, f"the commit of step {done}", self._cluster.backend.abort)
        if leaving:
            await self._part(waiting)
        if waiting.joiners and waiting.is_saving:
            self._saves.hurry()  # the next epoch has other members, which have no part in it
        elif waiting.joiners:
            raise WorldChanges(f"step {done} is committed, and workers wait to join")

    async def _reach(self, done: int, values: dict[str, Any], is_due: bool) -> tuple[Waiting, bool]:
        """Commit a step, and begin its checkpoint if that is due and nobody waits to join. Returns what waits, and whether ranks leave."""
        before, self.values = self.values, {**self.values, **values}
        waiting = Waiting()
        try:
            leaving = self._leavers is not None and await self._leavers.any_at(done)
            if self._cluster.elastic and (passes(self.step, done, self.every) or leaving):
                waiting = await self._commit(Mark(self._cluster.topology.epoch, done))
        except BaseException:
            self.values = before  # `step` is still the one before, and these are its values
            raise
        self.step, self.settled = done, True
        self._cluster.telemetry.reach(done)
        if is_due and not waiting.joiners:  # the next epoch would interrupt it, and begins it: `make_good`
            await self.save()
        return waiting, leaving

    async def _part(self, waiting: Waiting) -> None:
        """Let ranks leave: all ranks know that some do. See [Note: wishes to leave] in leavers.py. Returns if nobody can leave before the
        joiners have the state."""
        cluster, step = self._cluster, self.step
        assert self._leavers is not None
        assert self._copying is not None
        # whoever waits gets the state from one that stays; but if no rank leaves, spares have no room
        one_stays = waiting.joiners or (waiting.spares and cluster.world_size > 1)
        leavers, others_stay = list[int](), False
        until_s = time.monotonic() + LEAVE_S
        while (found := await self._leavers.agree(step, one_stays=one_stays)) != leavers:
            leavers = found
            if cluster.elastic:
                await self._copying.hand_over(self._committed, leavers)  # before a slow disk has its turn: they may be killed meanwhile
            others_stay = cluster.elastic and len(leavers) < cluster.world_size
            if not (others_stay and waiting.is_saving):  # else the checkpoint of an earlier step is done sooner
                await self.save()
            # the leaving ranks write a part of it
            await self._saves.settle(max(0.0, until_s - time.monotonic()) if others_stay else None)
        if not leavers and waiting.is_saving:
            return  # the joiners come when that is done: they ask again after the next step
        self._brings_copies, self._leavers = cluster.elastic, None  # whoever is told from now on stays until the next epoch is safe
        if not leavers:
            return
        if cluster.rank in leavers or (self._departure.wanted and not cluster.elastic):
            outcome = "the others go on" if others_stay else await self._saves.legacy()
            log.warning("rank %d leaves, as it was told, after step %d; %s", cluster.rank, step, outcome)
            await self.abandon()
            await cluster.withdraw()
            await self._departure.leave()
        names = " and ".join(f"rank {rank} ({cluster.topology.members[rank].address})" for rank in leavers)
        told = f"{names} {'was' if len(leavers) == 1 else 'were'} told to leave"
        if cluster.elastic:
            raise WorldChanges(f"{told}; step {step} is committed", leavers)
        await cluster.backend.aclose()  # with a goodbye, as the leavers do
        raise Preempted(f"{told}, and this job is not elastic; {self._saves.result}; start the job again to go on from the last checkpoint")

    async def save(self) -> None:
        """Begin a checkpoint of the step that was just committed, for example at the end of a training; `commit` does this by itself at
        every `save_every`-th step. Does nothing if no checkpoints are wanted, or if that step has one. Errors are logged, except for a
        value that no file can hold, which raises UsageError. A collective."""
        await self._saves.save(self.step, self.values)

    async def _commit(self, mark: Mark) -> Waiting:
        assert self._copying is not None
        begin_s = time.perf_counter()
        generation = self._next
        generation.begin(mark)
        await asyncio.to_thread(self._take, generation)
        joiners, spares = self._cluster.joiners, self._cluster.spares
        waiting = await self._copying.commit(generation, joiners, spares, is_saving=self._saves.is_saving)
        self._committed, self._next = generation, self._committed
        self._next.taken_over.clear()  # not needed any more, and large
        self.commit_s = time.perf_counter() - begin_s
        return waiting

    def _take(self, generation: Generation) -> None:
        """Copy what this rank holds."""
        assert self._inventory is not None
        spread: list[Piece] = []
        replicated: list[Piece] = []
        for piece, is_replicated in self._inventory.pieces():
            (replicated if is_replicated else spread).append(piece)
        generation.spread.take(plain(spread))
        generation.local.take(
            {
                "pieces": plain(replicated),
                "rest": self._inventory.rest(),
                "random": random_state(),
                "structure": self._structure,
                "shared": {
                    "values": self.values,
                    "kinds": self._inventory.kinds,
                    "parts": self._inventory.shared(),
                },
            }
        )
