"""Fully sharded data parallel training: parameters, gradients and optimizer state spread over ranks.

Read in this order: wrapper.py (what users call), placement.py (what becomes a unit), group.py (one flat buffer),
full_buffer.py (how its memory comes and goes), unit.py (its states), runtime.py (what happens at each hook),
prefetch.py and reductions.py (what overlaps).
"""

from shardnet.fsdp.async_wrapper import AsyncFSDP
from shardnet.fsdp.memory import MemoryReport, memory_report
from shardnet.fsdp.state import ShardedState
from shardnet.fsdp.wrapper import FSDP
from shardnet.sharding import ShardingStrategy

__all__ = ["FSDP", "AsyncFSDP", "MemoryReport", "ShardedState", "ShardingStrategy", "memory_report"]
