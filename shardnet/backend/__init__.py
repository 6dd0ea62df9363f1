"""The abstraction that sharded training stands on: collectives with awaitable handles.

Read in this order: base.py (`Backend`) and pending.py (the handle); arguments.py (what is refused), mesh_backend.py (collectives of
CPU tensors), loopback.py and cluster.py (over which mesh); staging.py and streams.py (tensors on a GPU). For torch's process groups
inside a node: torch_source.py and torch_group.py, stage.py, stages.py and line.py (what is under way), torch_backend.py and
torch_sums.py; hybrid_backend.py, rails.py and crossing.py (nodes of several ranks). node_buffer.py, gather.py, agreement.py and
tensors.py are what others build with.
"""

from shardnet.backend.base import Backend
from shardnet.backend.loopback import LoopbackBackend
from shardnet.backend.mesh_backend import SubBackend
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.backend.pending import Pending
from shardnet.collectives.reduction import ReduceOp

__all__ = ["Backend", "LoopbackBackend", "NodeBuffer", "Pending", "ReduceOp", "SubBackend"]
