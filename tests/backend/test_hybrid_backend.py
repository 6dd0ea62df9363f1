"""What a backend over torch inside nodes has beyond the contract: in which order it launches."""

import threading
from collections import defaultdict
from typing import Any

import pytest
import torch

from shardnet.backend import Backend
from shardnet.backend.hybrid_backend import HybridBackend
from shardnet.backend.torch_group import TorchGroup
from shardnet.testing import each_rank
from tests.backend.torch_ranks import torch_cluster

LARGE = 100_000  # elements of float32, which do not go over the mesh
ROUNDS = 20


async def test_no_launch_waits_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that do one launch at a time, as on a GPU, where one may keep the process from all others until it ends: if two ranks of a node
    came to two launches in different orders, each would wait for the other. See [Note: nothing waits in a launch]."""
    launching: dict[int, threading.RLock] = defaultdict(threading.RLock)  # by rank

    def one_at_a_time(name: str) -> None:
        launch = getattr(TorchGroup, name)

        def launch_alone(self: TorchGroup, *arguments: Any) -> None:
            with launching[self._members[self.rank]]:
                launch(self, *arguments)

        monkeypatch.setattr(TorchGroup, name, launch_alone)

    for name in ("gather", "exchange", "broadcast"):
        one_at_a_time(name)
    async with torch_cluster(HybridBackend, 4, ranks_per_node=2) as ranks:

        async def work(rank: Backend) -> None:
            x = torch.ones(LARGE)
            handles = []
            for _ in range(ROUNDS):
                handles += [rank.all_reduce(x), rank.all_gather(x), rank.reduce_scatter(x), rank.all_to_all(x), rank.broadcast(x, 3)]
            for handle in handles:
                await handle

        await each_rank(ranks, work)
