"""`run`: calls a training function again whenever the world has changed.

[Note: who is at fault] A collective that ends in a timeout or a mismatch may be the fault of all ranks: then it will fail again. But a
worker may be stuck, a newcomer may run another program, and a collective may fail on one rank alone, for example from lack of memory. So
the others go on without the faulty worker, once at each step. They name missing ranks to the rendezvous. Newcomers that disagree before
the first step is done, and a worker with an error of its own, end themselves. If several newcomers disagree, one of them may hear of the
loss of another newcomer instead of the mismatch, and then joins again: so a mismatch with newcomers is tried again a few times.
"""

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from shardnet.elastic.saves import Saving
from shardnet.elastic.state import State
from shardnet.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatch,
    CollectiveTimeout,
    EndNotSaved,
    JoinRefused,
    JoinTimeout,
    PeerLost,
    WorldChanges,
    chain,
)
from shardnet.fsdp.runtime import forget_graphs
from shardnet.rendezvous.refusal import Refusal
from shardnet.training import Cluster, Departure, connect

T = TypeVar("T")
log = logging.getLogger(__name__)
COLLECTIONS = 10  # at most; two are enough for most models
MISMATCHES = 3  # with newcomers, at one step
ELSEWHERE_S = 2.0  # the longest wait for collections of other threads
_collecting = threading.Lock()  # several members may be threads of one process
END_S = 7 * 24 * 3600.0  # rank 0 may need long to write its results at the end; a dead rank is noticed in any case
REFORM_S = 2.0  # the longest wait of a worker that is to leave for the next epoch; after a failure a launcher kills it 5 s after it told it
LAST_WAIT_S = 30.0  # the same of one that was told before it knew of a loss: the others may be in the middle of a long step
Train = Callable[[Cluster, State], Awaitable[T]]


async def run(
    train: Train[T],
    *,
    every: int = 1,
    checkpoints: str | os.PathLike[str] | None = None,
    save_every: int = 1000,
    keep: int = 2,
    **settings: Any,
) -> T | None:
    """Join a cluster and train; when a worker is lost, or others wait to join, form the next epoch and call `train` again.

        async def train(cluster, state):
            model = await cluster.shard(Net(), units=(Block,))
            optimizer = torch.optim.AdamW(model.parameters())
            await state.resume(model, optimizer)
            while state.step < 1000:
                ...
                await state.commit(state.step + 1)

        await elastic.run(train)

    `shardnet run --min-workers` and --restarts, or the settings `elastic`, `min_world_size` and `max_world_size`, say whether the job is
    elastic, and how many workers it may have. In a job that is not elastic `train` is called once, commits cost nothing, and the first
    loss ends the run, as it does with `connect`.

    train     makes everything that it needs, for the cluster as it is now; `State.resume` brings it to where the training stands.
              Its last result is returned when all ranks have one; None for a worker that comes after the training is over
    every     steps between commits: a loss costs at most this number of steps and the one in flight
    settings  of `connect`

    checkpoints, save_every, keep
              a folder that all workers see, steps from one checkpoint to the next, and how many are kept. A training that begins, or that
              has lost more workers than there were copies of what they held, goes on from the last one. None: no checkpoints

    An error from `train` ends this worker, unless it is PeerLost or comes from one: then the survivors go on without the lost worker. They
    also go on, once at each step, when a CollectiveTimeout says which ranks are missing, when newcomers cause a CollectiveMismatch (then a
    few times), and after another CollectiveError, which tells of an error on another rank. Raises JoinTimeout if fewer workers than
    `min_world_size` are left and no others come within `join_s`, and EndNotSaved on all ranks, when they have left the cluster as at any
    other end, if `train` has returned on all of them and only the last checkpoint could not be written.
    """
    saving = None if checkpoints is None else Saving(Path(checkpoints), save_every, keep)
    departure = Departure.current()
    result: T | None = None
    unsaved: EndNotSaved | None = None
    try:
        async with connect(**settings) as cluster:
            state = State(cluster, every=every, saving=saving)
            try:
                with departure.heeded(lambda: state.can_part):
                    result = await _epochs(train, cluster, state, departure)
                unsaved = await state.end_error()
            finally:
                await state.abandon()
    except JoinRefused as refusal:
        if refusal.reason != Refusal.ENDED:
            raise
        log.warning("%s", refusal)
    if unsaved is not None:  # raised only now: leaving by an error would say that this worker is lost, and others would train again
        raise unsaved
    if departure.wanted:  # told during the last steps, too late for a commit to act on it; the result of the training is worth more
        log.warning("the training was over before this worker could leave: its program goes on, and a second SIGTERM ends it")
    return result


async def _epochs(train: Train[T], cluster: Cluster, state: State, departure: Departure) -> T:
    """Train epoch by epoch, until all ranks have ended."""
    trouble_at, troubles = -1, 0  # the step at which a collective failed although nobody died, and how often
    while True:
        result: list[T] = []
        try:
            result.append(await train(cluster, state))
            with contextlib.suppress(CheckpointError):  # the training is over all the same; `run` raises an error at the end
                await state.saved()
            if cluster.elastic:  # a rank that left now would be missing for ranks that have to do a step again
                await cluster.backend.barrier(timeout_s=END_S, label="the end of the training")
        except Exception as error:
            why = _reason(error, state)
            if why is None or not cluster.elastic:
                raise
            if not isinstance(why, PeerLost | WorldChanges):
                troubles = troubles + 1 if state.step == trouble_at else 1
                if troubles > (MISMATCHES if isinstance(why, CollectiveMismatch) else 1):
                    raise
                trouble_at = state.step
        else:
            return result[0]
        await state.abandon()
        state.end_epoch(str(why))
        ended, epoch = cluster.backend, cluster.topology.epoch
        missing = _missing(why) - {cluster.rank}
        try:
            with departure.delayed(REFORM_S, LAST_WAIT_S) if state.has_copies else contextlib.nullcontext():  # others may need the copies
                await cluster.reform(agreed=isinstance(why, WorldChanges), missing=missing)
        except JoinRefused as refusal:
            if refusal.reason != Refusal.ENDED or not result:
                raise
            return result[0]  # a rank was lost at the very end, but others have ended, so all had reached the last barrier
        except JoinTimeout as timeout:
            timeout.add_note(f"It waited for the epoch that was to follow epoch {epoch}, which had ended: {why}")
            raise
        why = None  # drop the error with everything it refers to: the frames of `train` and all that is in them
        forget_graphs(ended)
        state.begin_epoch()
        await asyncio.to_thread(_collect_models)


def _collect_models() -> None:
    """Free the old models. They and their hooks are reference cycles: without this there would be two models at once. Objects that other
    libraries attach to autograd's graphs may be freed only one layer per collection."""
    runs, me, until = 0, threading.get_ident(), time.monotonic() + ELSEWHERE_S

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal runs
        runs += phase == "stop" and info["generation"] == 2 and threading.get_ident() == me

    with _collecting:
        gc.callbacks.append(count)
        try:
            while runs < COLLECTIONS and time.monotonic() < until:
                before = runs
                if gc.collect():
                    continue
                if runs > before:
                    return
                time.sleep(0.001)  # a collection is under way in another thread, so that ours has done nothing
        finally:
            gc.callbacks.remove(count)


def _missing(why: Exception) -> set[int]:
    """The ranks for which nobody need wait: those that a collective has waited for in vain, or that leave."""
    match why:
        case CollectiveTimeout():
            return {*why.missing}
        case WorldChanges():
            return {*why.leaving}
    return set()


def _reason(error: BaseException, state: State) -> CollectiveError | WorldChanges | None:
    """The error that has ended the epoch; None for an error of the training itself. See [Note: who is at fault]."""
    for each in chain(error):
        match each:
            case CollectiveTimeout() if not each.missing:
                continue  # all ranks were there: the network or the program is too slow, and will be again
            case CollectiveMismatch() if state.settled or not state.has_copies:
                continue  # there is no newcomer, or this worker is one
            case CollectiveError() | WorldChanges():
                return each
    return None
