"""The abstraction that sharded training is built on: collectives with awaitable handles.

Read in this order: base.py (`Backend`) and pending.py (the handle); arguments.py and checked.py (checks of arguments), mesh_backend.py
(collectives of CPU tensors), loopback.py and cluster.py (which mesh they go over); staging.py and streams.py (tensors on a GPU). For
torch's process groups inside a node: torch_source.py and torch_group.py, stage.py, stages.py and line.py (what is under way),
torch_backend.py and torch_sums.py; hybrid_backend.py, rails.py and crossing.py (nodes of several ranks). The other files build on
node_buffer.py, gather.py, agreement.py and tensors.py.
"""

from shardnet.backend.base import Backend
from shardnet.backend.loopback import LoopbackBackend
from shardnet.backend.mesh_backend import SubBackend
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.backend.pending import Pending
from shardnet.collectives.reduction import ReduceOp

__all__ = ["Backend", "LoopbackBackend", "NodeBuffer", "Pending", "ReduceOp", "SubBackend"]
