"""ZeRO-1: optimizer state spread over ranks, for modules that every rank holds whole.

Read in this order: optimizer.py (what users call), split.py (which optimizers can be split in which way), parameters.py,
bucketing.py and bucket.py (flat buffers), agreement.py (what ranks compare before a step), reduction.py (gradients), gathers.py
(which modules wait for parameters). Saving and loading: state.py and pieces.py, exchange.py and codec.py (on the wire). shard.py
and shard_map.py are pure arithmetic.
"""

from shardnet.zero.optimizer import ZeroOptimizer
from shardnet.zero.shard import OptimizerShard
from shardnet.zero.shard_map import ZeroShardMap
from shardnet.zero.split import Split
from shardnet.zero.state import merge_state_dicts

__all__ = ["OptimizerShard", "Split", "ZeroOptimizer", "ZeroShardMap", "merge_state_dicts"]
