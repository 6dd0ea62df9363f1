"""Ranks in one process whose large data goes over gloo."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from torch._C._distributed_c10d import HashStore

from shardnet.backend.torch_backend import TorchBackend
from shardnet.backend.torch_source import TorchSource
from shardnet.config import NodeEngine
from shardnet.testing import loopback_cluster


@asynccontextmanager
async def torch_cluster(make: type[TorchBackend], world_size: int, **options: Any) -> AsyncIterator[Sequence[TorchBackend]]:
    """A backend of that class for each rank of `loopback_cluster(world_size, **options)`."""
    store = HashStore()
    source = TorchSource(NodeEngine.GLOO, lambda: store)
    async with loopback_cluster(world_size, **options) as ranks:
        yield [make(rank._board, rank._group, rank._timeouts, source) for rank in ranks]
