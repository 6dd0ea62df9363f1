"""`ReductionQueue`: reduces the gradients of units while backward goes on.

[Note: reduction queue] Reductions start in an order that all ranks agree on: backward's, that is, the units of the
forward in reverse order of first use. A unit whose gradients are complete waits until those before it have started.
The order of completion would not do: where a parameter is unused on some ranks, its unit completes at different
moments, and the ranks would reduce different units with each other.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from shardnet.backend import Pending, ReduceOp
from shardnet.fsdp.averages import ReplicaAverages
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.compressed.across import CompressedAcross, Crossing
from shardnet.fsdp.compressed.reduction import CompressedReduction, Exchange
from shardnet.fsdp.gradients import GradientBuffer
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.lent_gradients import LentGradients
from shardnet.fsdp.stepping import BackwardSteps
from shardnet.fsdp.unit import Unit


@dataclass(slots=True)
class _Reduction:
    """One group's gradients on their way; full-size and reduced ones belong to the collective until it is done."""

    group: FlatGroup
    pending: Pending[torch.Tensor]  # gives this rank's part
    release: Callable[[], object] | None = None  # return the full gradients, once nobody reads them any more; None: they were returned
    exchange: Exchange | None = None  # must be finished before `pending` can be done
    crossing: Crossing | None = None  # goes on by itself

    def advance(self) -> None:
        """Do what can be done without blocking: unpack what has arrived, and return gradients that nobody reads any more."""
        if self.exchange is not None and self.exchange.arrived:
            self.exchange.finish()
        if self.crossing is not None and self.crossing.is_read:
            self._return()

    def unpack(self) -> None:
        """Finish the exchange, if there is one; its error goes to `pending`."""
        if self.exchange is not None:
            self.exchange.finish()

    def end(self) -> None:
        """`pending` is done, or has failed: return everything."""
        self._return()
        if self.crossing is not None:
            self.crossing.free()

    def _return(self) -> None:
        release, self.release = self.release, None
        if release is not None:
            release()


class ReductionQueue:
    """After the start of a unit's reduction at most `limit` groups' full-size gradients are under way: the queue waits for the oldest."""

    def __init__(self, comms: Communicators, limit: int) -> None:
        self._comms = comms
        self._averages = ReplicaAverages(comms)
        self._limit = limit
        self._planned: deque[Unit] = deque()
        self._ready: set[Unit] = set()
        self._in_flight: deque[_Reduction] = deque()
        self.steps: BackwardSteps | None = None  # that step what is reduced; None: the caller's optimizer steps later

    @property
    def active(self) -> bool:
        return bool(self._planned or self._in_flight)

    def plan(self, units: Iterable[Unit]) -> None:
        """Append units that will be reduced, in the order of their reductions."""
        self._planned.extend(unit for unit in units if unit.awaits_reduction and unit not in self._planned)

    def planned(self) -> list[Unit]:
        return list(self._planned)

    def ready(self, unit: Unit) -> None:
        """The unit's gradients are complete: start its reduction, and those that waited for it, as the order allows."""
        self._ready.add(unit)
        while self._planned and self._planned[0] in self._ready:
            self._start(self._planned.popleft())

    def advance(self) -> None:
        """Unpack what has arrived, so that its average over replicas starts, and step what is reduced. Never blocks."""
        for reduction in self._in_flight:
            reduction.advance()
        while self.steps is not None and self._in_flight and self._in_flight[0].pending.done():
            self._complete_oldest()

    def finish(self) -> None:
        """Reduce what is left of the plan, missing gradients as zeros, and wait for everything."""
        while self._planned:
            self._start(self._planned.popleft())
        for reduction in self._in_flight:
            reduction.unpack()  # all at first, so that their averages over replicas go on side by side
        while self._in_flight:
            self._complete_oldest()
        self._ready.clear()

    def cancel_plan(self) -> None:
        """Forget what was planned; gradients that were collected stay where they are."""
        self._planned.clear()
        self._ready.clear()

    def abandon(self) -> None:
        """Wait for what is under way, whether it succeeds or fails, and forget everything."""
        self.cancel_plan()
        if self.steps is not None:
            self.steps.forget()
        while self._in_flight:
            self._in_flight[0].unpack()
            reduction = self._in_flight.popleft()
            reduction.pending.exception()
            reduction.end()

    def _start(self, unit: Unit) -> None:
        self._ready.discard(unit)
        for group in unit.groups:
            if group.awaits_reduction:
                self._in_flight.append(self._reduce(group))
        while len(self._in_flight) > self._limit:
            self._complete_oldest()

    def _reduce(self, group: FlatGroup) -> _Reduction:
        gradients = group.gradients
        if isinstance(group.compressed_reduction, CompressedAcross):
            return self._reduce_across(group, gradients, group.compressed_reduction)
        if isinstance(gradients, LentGradients):
            return self._reduce_pieces(group, gradients)
        if group.compressed_reduction is not None:
            return self._reduce_compressed(group, gradients, group.compressed_reduction)
        full = gradients.take()
        release = partial(gradients.returned, full)
        try:
            return _Reduction(group, self._mean(full, group).quietly(), release)
        except BaseException:
            release()
            raise

    def _reduce_pieces(self, group: FlatGroup, gradients: LentGradients) -> _Reduction:
        pieces = gradients.take()
        release = partial(gradients.returned, pieces)
        try:
            return _Reduction(group, self._mean_of_pieces(pieces, group).quietly(), release)
        except BaseException:
            release()
            raise

    def _reduce_compressed(self, group: FlatGroup, gradients: GradientBuffer, compressed: CompressedReduction) -> _Reduction:
        full = gradients.take()
        try:
            exchange = compressed.start(full, group.reduction_label)
        finally:
            gradients.returned(full)  # what is sent is packed
        return _Reduction(group, self._average(exchange.mean, group).quietly(), exchange=exchange)

    def _reduce_across(self, group: FlatGroup, gradients: GradientBuffer | LentGradients, compressed: CompressedAcross) -> _Reduction:
        pieces: Sequence[torch.Tensor]
        release: Callable[[], object]
        if isinstance(gradients, LentGradients):
            pieces = gradients.take()
            release = partial(gradients.returned, pieces)
        else:
            full = gradients.take()
            pieces, release = [full], partial(gradients.returned, full)
        try:
            crossing = compressed.start(pieces, group.reduction_label)
        except BaseException:
            release()
            raise
        return _Reduction(group, self._average(crossing.mean.quietly(), group).quietly(), release, crossing=crossing)

    def _mean(self, full: torch.Tensor, group: FlatGroup) -> Pending[torch.Tensor]:
        """Start turning full gradients [N] into this rank's part of their mean over all ranks."""
        out = group.place_for_gradient(full.dtype)
        if self._comms.shard_count == 1:
            return self._comms.averages.all_reduce(full, ReduceOp.MEAN, out=out, label=group.label)
        part = self._comms.reductions.reduce_scatter(full, ReduceOp.MEAN, sizes=group.layout.sizes, out=out, label=group.label)
        return self._average(part, group)

    def _mean_of_pieces(self, pieces: Sequence[torch.Tensor], group: FlatGroup) -> Pending[torch.Tensor]:
        """The same for gradients that other ranks read where they are."""
        if self._comms.shard_count == 1:
            return self._comms.averages.all_reduce_pieces(pieces, ReduceOp.MEAN, label=group.label)
        part = self._comms.reductions.reduce_scatter_pieces(pieces, ReduceOp.MEAN, sizes=group.layout.sizes, label=group.label)
        return self._average(part, group)

    def _average(self, part: Pending[torch.Tensor], group: FlatGroup) -> Pending[torch.Tensor]:
        """Start, if there are replicas, what is left to do for this rank's part after its node's half of the reduction."""
        return part if self._comms.replica_count == 1 else self._averages.follow(part, group.label, group.device)

    def _complete_oldest(self) -> None:
        self._in_flight[0].unpack()
        reduction = self._in_flight.popleft()
        try:
            shard_gradient = self._comms.wait(reduction.pending, f"reduce {reduction.group.label}")
        finally:
            reduction.end()
        reduction.group.accept(shard_gradient)
        if self.steps is not None:
            self.steps.reduced(reduction.group)
