"""Which ranks share one copy, and which hold the same shard."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardnet.errors import InvalidWorldSizeError
from shardnet.sharding.strategy import ShardingStrategy


@dataclass(frozen=True, slots=True)
class ShardingRanks:
    """The place of one rank. Ranks are the backend's, ascending."""

    shards: tuple[int, ...]  # together hold one copy of everything, one shard each
    replicas: tuple[int, ...]  # hold the same shard


def sharding_ranks(
    strategy: ShardingStrategy, rank: int, world_size: int, nodes: Sequence[Sequence[int]], intra_node_size: int | None = None
) -> ShardingRanks:
    """The place of `rank` under a strategy. `intra_node_size` matters for HYBRID_SHARD only; None: use the nodes in `nodes`.

    Raises InvalidWorldSizeError if the world cannot be cut into nodes of equal size.
    """
    everyone = tuple(range(world_size))
    match strategy:
        case ShardingStrategy.FULL_SHARD | ShardingStrategy.SHARD_GRAD_OP:
            return ShardingRanks(everyone, (rank,))
        case ShardingStrategy.NO_SHARD:
            return ShardingRanks((rank,), everyone)
        case ShardingStrategy.HYBRID_SHARD:
            grid = _grid(world_size, nodes, intra_node_size)
            node = next(members for members in grid if rank in members)
            place = node.index(rank)
            return ShardingRanks(node, tuple(members[place] for members in grid))


def neighbours(shards: Sequence[int], rank: int, count: int) -> tuple[int, ...]:
    """Of the ranks that hold the shards of one copy, the block of `count` consecutive ones that contains `rank`; `count` divides their
    number."""
    first = shards.index(rank) // count * count
    return tuple(shards[first : first + count])


def _grid(world_size: int, nodes: Sequence[Sequence[int]], size: int | None) -> list[tuple[int, ...]]:
    """The ranks of each node, equally many on each."""
    if size is not None:
        if size <= 0 or world_size % size:
            raise InvalidWorldSizeError(f"HybridShard: world_size={world_size} must be a positive multiple of intra_node_size={size}")
        return [tuple(range(first, first + size)) for first in range(0, world_size, size)]
    sizes = {len(node) for node in nodes}
    if len(sizes) != 1:
        found = ", ".join(str(len(node)) for node in nodes)
        raise InvalidWorldSizeError(
            f"HybridShard: the nodes have {found} ranks; start the same number on each node, or give intra_node_size"
        )
    return [tuple(node) for node in nodes]
