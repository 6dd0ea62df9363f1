"""Fully sharded data parallel training: parameters, gradients and optimizer state spread over ranks.

Read in this order.

What users call: wrapper.py; async_wrapper.py with surroundings.py (the same for async programs, and what torch keeps for each thread).
What it is made of: arguments.py, options.py, precision.py (in which dtypes), resharding.py (what is freed when), compression.py (what is
sent in fewer bits), ignored.py (what is left alone), offload.py (GPUs that hold one unit at a time).

A model at work: placement.py (what becomes a unit), group.py (one flat buffer) with full_buffer.py and pool.py (how its memory comes and
goes), unit.py (its states), hooks.py and runtime.py (what happens at each of them) with passes.py and tensors.py. What overlaps:
prefetch.py and reductions.py, with communicators.py (groups of ranks) and shard_streams.py (reading shards on a GPU); secondary.py
(shards kept for backward). stepping.py (optimizers that step in backward).

Gradients: gradients.py and lent_gradients.py (until they are reduced), elsewhere.py (of a loss that reads parameters), averages.py over
node_grid.py (where several ranks hold one shard). clipping.py, grad_scaler.py, uneven.py (ranks that hold unequal numbers of samples).
Packed: compressed/.

The first contents: initial.py, and meta/ for models that are built without memory. Contents as states: state.py.

What is refused: alike.py (ranks that shard differently), absent.py (reading a parameter where it is not whole), known.py (parameters
that were not sharded), optimizers.py. What is measured: memory.py, timeline.py.
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
