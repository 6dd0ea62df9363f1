"""`Cluster.shard` in several tasks."""

import asyncio

from torch import nn

from shardnet import Cluster
from shardnet.testing import ClusterRunner


async def _shard_two(cluster: Cluster, label: str) -> list[str]:
    """Two modules of the same shapes, on rank 1 in the other order."""
    numbers = (0, 1) if cluster.rank == 0 else (1, 0)
    made = await asyncio.gather(*(cluster.shard(nn.Linear(3, 1), label=label.format(number)) for number in numbers), return_exceptions=True)
    await cluster.shard(nn.Linear(3, 1), label="in one order")
    return [type(each).__name__ for each in made]


def test_modules_that_are_sharded_in_different_orders_are_told_apart_by_their_labels(cluster: ClusterRunner) -> None:
    """Otherwise one would get the weights of the other."""
    assert cluster.run(_shard_two, 2, args=("model {}",)) == [["CollectiveMismatch"] * 2] * 2
    assert cluster.run(_shard_two, 2, args=("",)) == [["AsyncFSDP"] * 2] * 2, "nobody can know"
