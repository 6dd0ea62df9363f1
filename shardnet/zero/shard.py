"""`OptimizerShard`: which elements of a flat buffer one rank keeps optimizer state for, and what that saves."""

from dataclasses import dataclass

from shardnet.errors import UsageError
from shardnet.sharding import shard_bounds

ADAM_STATE_BYTES = 8  # of one parameter: first and second moment, float32 each


@dataclass(frozen=True, slots=True)
class OptimizerShard:
    """The elements [start, end) of `total_params` that belong to `rank`. Pure arithmetic, no traffic.

    The shards of all ranks cover every element once, in rank order, and differ in size by at most one. Raises ValueError
    (a `UsageError`) for a world without ranks, a rank outside it or a negative number of parameters.
    """

    rank: int
    world_size: int
    total_params: int

    def __post_init__(self) -> None:
        if self.total_params < 0:
            raise UsageError(f"total_params must not be negative, got {self.total_params}")
        shard_bounds(self.total_params, self.rank, self.world_size)  # checks the other two

    @classmethod
    def for_rank(cls, rank: int, world_size: int, total_params: int) -> "OptimizerShard":
        """The shard of one rank; the same as calling the class."""
        return cls(rank, world_size, total_params)

    @property
    def start(self) -> int:
        """The first element."""
        return shard_bounds(self.total_params, self.rank, self.world_size)[0]

    @property
    def end(self) -> int:
        """One past the last element."""
        return shard_bounds(self.total_params, self.rank, self.world_size)[1]

    @property
    def shard_size(self) -> int:
        """How many elements."""
        return self.end - self.start

    def owns_param(self, index: int) -> bool:
        """Whether an element is in this shard."""
        return self.start <= index < self.end

    @property
    def memory_savings(self) -> float:
        """The part of the whole optimizer state that a rank does not hold, in [0, 1): 1 − 1 / world_size."""
        return 1 - 1 / self.world_size

    @property
    def shard_memory_bytes(self) -> int:
        """Adam's state for this shard."""
        return self.shard_size * ADAM_STATE_BYTES

    @property
    def full_memory_bytes(self) -> int:
        """Adam's state for all elements."""
        return self.total_params * ADAM_STATE_BYTES
