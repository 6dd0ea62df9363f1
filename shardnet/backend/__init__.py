"""The abstraction that sharded training stands on: collectives with awaitable handles."""

from shardnet.backend.base import Backend
from shardnet.backend.loopback import LoopbackBackend
from shardnet.backend.mesh_backend import SubBackend
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.backend.pending import Pending
from shardnet.collectives.reduction import ReduceOp

__all__ = ["Backend", "LoopbackBackend", "NodeBuffer", "Pending", "ReduceOp", "SubBackend"]
