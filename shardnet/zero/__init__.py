"""ZeRO-1: optimizer state spread over ranks, for modules that every rank holds whole.

Read in this order: optimizer.py (what users call), split.py (which optimizers can be cut how), parameters.py, bucketing.py
and bucket.py (flat buffers), reduction.py (gradients), gathers.py (who waits for parameters), state.py (saving and loading). shard.py
and shard_map.py are arithmetic alone.
"""

from shardnet.zero.optimizer import ZeroOptimizer
from shardnet.zero.shard import OptimizerShard
from shardnet.zero.shard_map import ZeroShardMap
from shardnet.zero.split import Split
from shardnet.zero.state import merge_state_dicts

__all__ = ["OptimizerShard", "Split", "ZeroOptimizer", "ZeroShardMap", "merge_state_dicts"]
