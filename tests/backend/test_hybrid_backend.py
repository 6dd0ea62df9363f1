"""What a backend over torch inside nodes guarantees beyond the contract: the order in which it launches."""

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

LARGE = 100_000  # elements of float32, too many to go over the mesh
ROUNDS = 10


async def test_no_launch_waits_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks do one launch at a time, as on a GPU, where a launch may keep the process from all others until it ends. If two ranks of a node
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


async def test_ranks_may_come_to_their_rails_in_any_order() -> None:
    """Ranks 0 and 2 share the first rail of two groups, and each of them makes the rail of a different group first."""
    async with torch_cluster(HybridBackend, 4, ranks_per_node=2) as ranks:
        firsts, seconds = ([rank.subgroup(range(4)) for rank in ranks] for _ in range(2))
        rails = []
        for rank, groups in ((0, (firsts, seconds)), (2, (seconds, firsts))):
            made = [group for each in groups if isinstance(group := each[rank], HybridBackend)]
            meshes = [each._rail(purpose, 0) for each in made for purpose in ("scatter", "gather")]
            assert len(meshes) == 4
            rails.append(meshes if rank == 0 else meshes[2:] + meshes[:2])
        for pair in zip(*rails, strict=True):
            sums = await each_rank(pair, lambda rank: rank.all_reduce(torch.ones(3)))
            assert all(each.tolist() == [2, 2, 2] for each in sums)
