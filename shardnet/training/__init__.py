"""The public loop: join a cluster, shard a model, train, leave."""

from shardnet.training.cluster import Cluster, connect
from shardnet.training.departure import Departure
from shardnet.training.program import run

__all__ = ["Cluster", "Departure", "connect", "run"]
