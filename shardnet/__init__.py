"""Sharded training of PyTorch models over any network that lets gRPC through.

The names below are the whole front door; they are imported when they are first used, so that `shardnet --help` need
not wait for torch.
"""

import importlib
import os
from typing import TYPE_CHECKING

# gRPC prints every closed connection at its default verbosity, and at ERROR each port that it cannot bind; both become errors
# of our own (shardnet.errors). It reads this when it is first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

if TYPE_CHECKING:
    from shardnet.backend import Backend, LoopbackBackend, Pending, ReduceOp, SubBackend
    from shardnet.config import Limits, Timeouts
    from shardnet.errors import PeerLost, ShardnetError
    from shardnet.fsdp import FSDP, AsyncFSDP, ShardingStrategy
    from shardnet.training import Cluster, connect, run

_HOME = {
    "shardnet.backend": ("Backend", "LoopbackBackend", "Pending", "ReduceOp", "SubBackend"),
    "shardnet.config": ("Limits", "Timeouts"),
    "shardnet.errors": ("PeerLost", "ShardnetError"),
    "shardnet.fsdp": ("FSDP", "AsyncFSDP", "ShardingStrategy"),
    "shardnet.training": ("Cluster", "connect", "run"),
}

__all__ = [
    "FSDP",
    "AsyncFSDP",
    "Backend",
    "Cluster",
    "Limits",
    "LoopbackBackend",
    "PeerLost",
    "Pending",
    "ReduceOp",
    "ShardingStrategy",
    "ShardnetError",
    "SubBackend",
    "Timeouts",
    "connect",
    "run",
]


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'shardnet' has no attribute {name!r}")
