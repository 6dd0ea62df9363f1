"""`UnevenSteps`: steps in which ranks hold unequal numbers of samples, or none any more.

[Note: joining with zeros] Gradients are the mean over ranks, which is the mean over samples only while all ranks hold
equally many. So each rank multiplies the mean loss of its own samples by own samples · world_size / samples of all ranks;
then the mean over ranks is the mean over samples. A rank without samples computes a batch that it has at hand with weight 0:
its forward and backward take part in every gather and reduction in the order of the others, and add exact zeros. Driving the
units without computing would spare that rank the work, but nobody would finish earlier: the other ranks compute for as long
anyway. It would also be a second path through the units, which would have to follow whatever a forward does: checkpoints,
units used twice, or only sometimes.
"""

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import torch

from shardnet.backend import Pending
from shardnet.errors import StateError, UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.tensors import tensors_in

T = TypeVar("T")
Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """One batch of a step on one rank."""

    batch: T
    weight: float  # multiply the mean loss of the samples in `batch` by it; 0.0 where only the others need this forward
    samples: int  # how many samples in `batch` count
    total: int  # of the step: all ranks and parts
    last: bool  # the step ends here: leave no_sync() for this backward, then clip and let the optimizer step


@dataclass(frozen=True, slots=True)
class _Announced(Generic[T]):
    """What this rank brings to a step, while it learns what the others bring."""

    batches: list[tuple[T, int]]  # those with samples, and how many
    counts: Pending[Tensor]  # gives [world_size, 4]: samples, batches with samples, batches, whether there is none to compute on


def count_samples(batch: object) -> int:
    """The length of the first tensor in a batch."""
    for tensor in tensors_in(batch):
        return len(tensor)
    raise UsageError(
        f"the batch (of type {type(batch).__name__}) contains no tensor from whose length to count its samples; give samples=, a function "
        "that counts them"
    )


class UnevenSteps(Generic[T]):
    """The parts of all steps, for `for` or `async for`, equally many on every rank; used once. Iterating is a collective.

    It reads one step ahead, so that the ranks' counts are exchanged while the step before is computed.
    """

    def __init__(
        self,
        batches: Iterable[T] | AsyncIterable[T],
        comms: Communicators,
        *,
        samples: Callable[[T], int],
        accumulate: int,
        dummy: T | None,
    ) -> None:
        if accumulate < 1:
            raise UsageError(f"accumulate must be at least 1, got {accumulate}")
        self._batches = aiter(batches) if isinstance(batches, AsyncIterable) else iter(batches)
        self._comms = comms
        self._samples = samples
        self._accumulate = accumulate
        self._at_hand = dummy  # a batch to compute with weight 0 when there is no other

    def __iter__(self) -> Iterator[Part[T]]:
        coming = self._announce(self._read())
        try:
            while (step := self._step(coming, self._comms.wait(coming.counts, "counts of samples"))) is not None:
                coming = self._announce(self._read())
                yield from step
        finally:
            coming.counts.quietly()

    async def __aiter__(self) -> AsyncIterator[Part[T]]:
        coming = self._announce(await self._read_async())
        try:
            while (step := self._step(coming, await coming.counts)) is not None:
                coming = self._announce(await self._read_async())
                for part in step:
                    yield part
        finally:
            coming.counts.quietly()

    def _read(self) -> list[T]:
        """The batches of a step."""
        if isinstance(self._batches, AsyncIterator):
            raise UsageError("the batches are an async iterable: use `async for part in model.uneven(batches)`")
        return list(islice(self._batches, self._accumulate))

    async def _read_async(self) -> list[T]:
        if not isinstance(self._batches, AsyncIterator):
            return self._read()
        read: list[T] = []
        while len(read) < self._accumulate:
            try:
                read.append(await anext(self._batches))
            except StopAsyncIteration:
                break
        return read

    def _announce(self, read: list[T]) -> _Announced[T]:
        batches = [(batch, count) for batch, count in zip(read, map(self._samples, read), strict=True) if count > 0]
        if batches:
            self._at_hand = batches[-1][0]
        own = [sum(count for _, count in batches), len(batches), len(read), self._at_hand is None]
        counts = self._comms.everyone.all_gather(torch.tensor([own], dtype=torch.int64, device="cpu"), label="counts of samples")
        return _Announced(batches, counts)

    def _step(self, announced: _Announced[T], counts: Tensor) -> list[Part[T]] | None:
        """This rank's parts; [] if no rank has samples, and None if none has batches either."""
        samples, used, read, helpless = counts.T.tolist()
        if not any(read):
            return None
        total, parts = sum(samples), max(used)
        if total and any(helpless):
            raise StateError(
                f"rank {helpless.index(1)} has had no samples yet, so it has no batch to compute with in a step of the other ranks; "
                "give every rank a batch as dummy="
            )
        batches = list(announced.batches)
        while len(batches) < parts and self._at_hand is not None:
            batches.append((self._at_hand, 0))
        scale = len(samples) / total if total else 0.0
        return [Part(batch, count * scale, count, total, index == parts - 1) for index, (batch, count) in enumerate(batches)]
