"""Sharded training of PyTorch models over any network that lets gRPC through.

The names below are the whole public interface; they are imported when they are first used, so that `shardnet --help` need
not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    for module, names in _HOME.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'shardnet' has no attribute {name!r}")
