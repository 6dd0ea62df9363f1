"""Fully sharded data parallel training: parameters, gradients and optimizer state spread over ranks.

Read in this order: wrapper.py (what users call) and arguments.py (of what it is made), placement.py (what becomes a
unit), group.py (one flat buffer), full_buffer.py (how its memory comes and goes), unit.py (its states), runtime.py
(what happens at each hook), absent.py (what is read where it is not whole), known.py and optimizers.py (what is
refused), prefetch.py and reductions.py (what overlaps), precision.py (in which dtypes), secondary.py (shards kept for
backward), compression.py (what is sent in fewer bits; then codec.py, compressed_gather.py, compressed_reduction.py,
compressed_across.py), meta.py (models that are built without memory), ignored.py (what is left alone), uneven.py (steps
of ranks that hold unequal numbers of samples), async_wrapper.py and surroundings.py (the same for async programs, and
what torch's thread state has to do with it).
"""

from shardnet.fsdp.async_wrapper import AsyncFSDP
from shardnet.fsdp.compression import Compression
from shardnet.fsdp.grad_scaler import GradScaler
from shardnet.fsdp.memory import MemoryReport, memory_report
from shardnet.fsdp.precision import MixedPrecision
from shardnet.fsdp.state import ShardedState
from shardnet.fsdp.wrapper import FSDP
from shardnet.sharding import ShardingStrategy

__all__ = [
    "FSDP",
    "AsyncFSDP",
    "Compression",
    "GradScaler",
    "MemoryReport",
    "MixedPrecision",
    "ShardedState",
    "ShardingStrategy",
    "memory_report",
]
