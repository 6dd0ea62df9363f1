"""`ZeroShardMap`: which rank owns which part of a transformer, by whole blocks."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from shardnet.errors import InvalidRankError, InvalidWorldSizeError, UsageError
from shardnet.sharding import shard_sizes


@dataclass(frozen=True, slots=True)
class ZeroShardMap:
    """The owner of every block, and of the embedding, final norm and head. Pure arithmetic, no traffic.

    Raises ValueError (a `UsageError`) for a world without ranks and for owners outside it.
    """

    block_owners: tuple[int, ...]
    world_size: int
    lm_head_owner: int = 0
    final_norm_owner: int = 0
    embedding_owner: int = 0

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise InvalidWorldSizeError(f"world size must be at least 1, got {self.world_size}")
        for owner in (*self.block_owners, self.lm_head_owner, self.final_norm_owner, self.embedding_owner):
            self._check_rank(owner)

    # --- ways to choose owners

    @classmethod
    def round_robin(cls, num_blocks: int, world_size: int) -> "ZeroShardMap":
        """Block i belongs to rank i % world_size."""
        _check_count(num_blocks, world_size)
        return cls(tuple(block % world_size for block in range(num_blocks)), world_size)

    @classmethod
    def contiguous(cls, num_blocks: int, world_size: int) -> "ZeroShardMap":
        """Neighbouring blocks together; the first num_blocks % world_size ranks have one more."""
        _check_count(num_blocks, world_size)
        counts = shard_sizes(num_blocks, world_size)
        return cls(tuple(rank for rank, count in enumerate(counts) for _ in range(count)), world_size)

    @classmethod
    def balanced(
        cls, block_sizes: Sequence[int], world_size: int, *, embedding_size: int = 0, final_norm_size: int = 0, lm_head_size: int = 0
    ) -> "ZeroShardMap":
        """By size, in parameters: the largest part first, each to the rank that has the least so far.

        No rank gets more than an equal share plus (1 − 1 / world_size) of the largest part (R. L. Graham, "Bounds on
        multiprocessing timing anomalies", 1969).
        """
        _check_count(len(block_sizes), world_size)
        *block_owners, embedding, final_norm, lm_head = balanced_owners(
            [*block_sizes, embedding_size, final_norm_size, lm_head_size], world_size
        )
        return cls(tuple(block_owners), world_size, lm_head_owner=lm_head, final_norm_owner=final_norm, embedding_owner=embedding)

    # --- who owns what

    def block_owner(self, block: int) -> int:
        """The rank that owns a block."""
        if not 0 <= block < len(self.block_owners):
            raise UsageError(f"block {block} is not in [0, {len(self.block_owners)})")
        return self.block_owners[block]

    def rank_owns_block(self, rank: int, block: int) -> bool:
        """Whether a block belongs to a rank."""
        self._check_rank(rank)
        return self.block_owner(block) == rank

    def blocks_for_rank(self, rank: int) -> list[int]:
        """The blocks of a rank, ascending."""
        self._check_rank(rank)
        return [block for block, owner in enumerate(self.block_owners) if owner == rank]

    def num_blocks_for_rank(self, rank: int) -> int:
        """How many blocks a rank owns."""
        return len(self.blocks_for_rank(rank))

    def memory_fraction_for_rank(self, rank: int) -> float:
        """The fraction of all blocks, by number and not by size, that a rank owns; 0.0 where there are none."""
        return self.num_blocks_for_rank(rank) / max(len(self.block_owners), 1)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(rank, self.world_size)


def balanced_owners(sizes: Sequence[int], world_size: int, *, held: Sequence[int] | None = None) -> list[int]:
    """A rank for each part, so that the ranks' sums of sizes are nearly equal; see `ZeroShardMap.balanced`.

    `held` is what each rank has already.
    """
    if any(size < 0 for size in sizes):
        raise UsageError(f"sizes must not be negative, got {list(sizes)}")
    loads = [(load, rank) for rank, load in enumerate(held or [0] * world_size)]
    heapq.heapify(loads)  # the lowest rank among those that have the least comes first
    owners = [0] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        load, owners[part] = loads[0]
        heapq.heapreplace(loads, (load + sizes[part], owners[part]))
    return owners


def _check_count(num_blocks: int, world_size: int) -> None:
    if world_size < 1:
        raise InvalidWorldSizeError(f"world size must be at least 1, got {world_size}")
    if num_blocks < 0:
        raise UsageError(f"the number of blocks must not be negative, got {num_blocks}")
