"""How flat buffers are cut into shards: pure arithmetic over torch shapes, no communication.

Read in this order: strategy.py (what is sharded), ranks.py (over which ranks), split.py (how one buffer is cut), layout.py (what lies
where); overlap.py (which parameters cannot be sharded).
"""

from shardnet.sharding.layout import FlatLayout, ParameterSlice, ParameterSpec
from shardnet.sharding.ranks import ShardingRanks, neighbours, sharding_ranks
from shardnet.sharding.split import shard_bounds, shard_sizes
from shardnet.sharding.strategy import ShardingStrategy

__all__ = [
    "FlatLayout",
    "ParameterSlice",
    "ParameterSpec",
    "ShardingRanks",
    "ShardingStrategy",
    "neighbours",
    "shard_bounds",
    "shard_sizes",
    "sharding_ranks",
]
