"""`ShardedSampler`: which samples a rank takes in which step, so that an epoch sees every sample exactly once.

[Note: weights] FSDP averages gradients over ranks, each rank counting the same. That is the mean over samples only
while all ranks hold equally many. In an epoch's last step they may not, so a rank multiplies the mean loss of its
own samples by `weight` = own samples · world_size / samples of all ranks. The mean over ranks of these products is
the mean over samples, whatever the sizes are. A rank without samples still takes part, since the others need it for
their collectives: it runs one sample with weight 0, which adds exact zeros. Each rank works this out by itself, since it
knows the whole data set; where each rank knows only its own part, use `FSDP.uneven`, which asks the other ranks.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from shardnet.errors import InvalidRankError, InvalidWorldSizeError, UsageError


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's part of one step."""

    indices: tuple[int, ...]  # never empty: with weight 0 it holds one dummy sample
    weight: float  # multiply the mean loss of `indices` by it, see [Note: weights]
    batch: int  # samples of all ranks together, dummies not counted

    @property
    def samples(self) -> int:
        """How many of `indices` count."""
        return len(self.indices) if self.weight > 0 else 0


class ShardedSampler:
    """Deals samples 0 … samples-1 to ranks and steps. Stateless: a step number alone gives its share.

    `batch` is the number of samples of one rank in one step. The order is a function of `seed` and the epoch, equal
    on all ranks and for all world sizes; `seed` None keeps the natural order. Steps count on over epochs.

    Raises UsageError for values that make no sense.
    """

    def __init__(self, samples: int, *, batch: int, rank: int, world_size: int, seed: int | None = None) -> None:
        if world_size < 1:
            raise InvalidWorldSizeError
        if not 0 <= rank < world_size:
            raise InvalidRankError(rank, world_size)
        if samples < 1 or batch < 1:
            raise UsageError(f"ShardedSampler needs at least one sample and a batch of one, got samples={samples}, batch={batch}")
        self.samples = samples
        self.global_batch = batch * world_size
        self._rank = rank
        self._world_size = world_size
        self._seed = seed
        self._order_of: tuple[int, list[int]] = (-1, [])  # the epoch asked for last, and its order

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def epoch(self, epoch: int) -> Iterator[Share]:
        """The shares of one epoch, in order."""
        first = epoch * self.steps_per_epoch
        return (self.share(step) for step in range(first, first + self.steps_per_epoch))

    def share(self, step: int) -> Share:
        """This rank's share of a step, counted from 0 over all epochs."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return self._share(epoch, within * self.global_batch)

    def at(self, position: int) -> Share:
        """This rank's share of the step that begins at a position: the number of samples that all ranks together have seen before, over
        all epochs. The next step begins `share.batch` further on, whatever the world size is by then."""
        return self._share(*divmod(position, self.samples))

    def _share(self, epoch: int, first: int) -> Share:
        batch = self._order(epoch)[first : first + self.global_batch]
        mine = batch[self._rank :: self._world_size]
        if not mine:
            return Share((batch[0],), 0.0, len(batch))
        return Share(tuple(mine), len(mine) * self._world_size / len(batch), len(batch))

    def _order(self, epoch: int) -> list[int]:
        if self._order_of[0] != epoch:
            self._order_of = (epoch, self._shuffled(epoch))
        return self._order_of[1]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self.samples))
        if self._seed is not None:
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order
