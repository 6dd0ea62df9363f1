"""Who shards with whom."""

import pytest

from shardnet.errors import InvalidWorldSizeError
from shardnet.sharding import ShardingRanks, ShardingStrategy, neighbours, sharding_ranks

ONE_NODE = ((0, 1, 2, 3),)
TWO_NODES = ((0, 1), (2, 3))
ALL = (0, 1, 2, 3)


def place(
    strategy: ShardingStrategy, rank: int = 2, *, nodes: tuple[tuple[int, ...], ...] = ONE_NODE, size: int | None = None
) -> ShardingRanks:
    return sharding_ranks(strategy, rank, 4, nodes, size)


def test_of_each_strategy() -> None:
    assert place(ShardingStrategy.FULL_SHARD) == ShardingRanks(ALL, (2,))
    assert place(ShardingStrategy.SHARD_GRAD_OP, nodes=TWO_NODES) == ShardingRanks(ALL, (2,))
    assert place(ShardingStrategy.NO_SHARD) == ShardingRanks((2,), ALL)
    assert place(ShardingStrategy.HYBRID_SHARD, nodes=TWO_NODES) == ShardingRanks((2, 3), (0, 2))
    assert place(ShardingStrategy.HYBRID_SHARD) == ShardingRanks(ALL, (2,))


@pytest.mark.parametrize("rank", range(4))
def test_a_given_size_cuts_neighbours_into_nodes(rank: int) -> None:
    """node = r // k; shards [node k, node k + k); replicas {n k + r % k}."""
    for size in (1, 2, 4):
        node = rank // size * size
        ranks = place(ShardingStrategy.HYBRID_SHARD, rank, nodes=ONE_NODE, size=size)
        assert ranks.shards == tuple(range(node, node + size))
        assert ranks.replicas == tuple(n * size + rank % size for n in range(4 // size))


def test_nodes_whose_ranks_are_not_neighbours() -> None:
    assert place(ShardingStrategy.HYBRID_SHARD, 1, nodes=((0, 2), (1, 3))) == ShardingRanks((1, 3), (0, 1))


def test_nodes_of_different_sizes_are_refused() -> None:
    with pytest.raises(
        InvalidWorldSizeError, match="the nodes have 3, 1 ranks; start the same number on each node, or give intra_node_size"
    ):
        place(ShardingStrategy.HYBRID_SHARD, nodes=((0, 1, 2), (3,)))


def test_neighbours_are_consecutive_among_the_ranks_of_a_copy() -> None:
    assert [neighbours(range(6), rank, 3) for rank in range(6)] == [(0, 1, 2)] * 3 + [(3, 4, 5)] * 3
    assert [neighbours((1, 3, 5, 7), rank, 2) for rank in (1, 3, 5, 7)] == [(1, 3)] * 2 + [(5, 7)] * 2
