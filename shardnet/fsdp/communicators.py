"""The groups of ranks that a sharded model talks to."""

from typing import TypeVar

from shardnet.backend import Backend, Pending
from shardnet.fsdp.compressed.across import Packer
from shardnet.fsdp.node_grid import NodeGrid
from shardnet.fsdp.shard_streams import ShardStreams
from shardnet.fsdp.timeline import Timeline
from shardnet.sharding import ShardingRanks, neighbours

T = TypeVar("T")


class Communicators:
    """Who holds the shards of one model. Lives as long as the wrapped model; the backend belongs to the caller.

    [Note: streams] Gathers, those among neighbours, reductions and averages over replicas are numbered separately, each
    in a group of its own. Gathers follow the order in which units are used, the others the order of [Note: reduction
    queue]. So a gradient that comes earlier on one rank than on another, because a parameter is unused on some ranks,
    cannot put a reduction before a gather on one rank and after it on another. And the user's own collectives, which
    may come from another thread meanwhile, are numbered apart from all of them.
    """

    def __init__(
        self, backend: Backend, ranks: ShardingRanks, neighbour_count: int | None = None, *, packs_gradients: bool = False
    ) -> None:
        self.backend = backend
        self.everyone = backend.subgroup(range(backend.world_size))
        self.gathers = backend.subgroup(ranks.shards)
        self.neighbours: Backend | None = None  # see [Note: secondary shards]
        if neighbour_count is not None:
            self.neighbours = backend.subgroup(neighbours(ranks.shards, backend.rank, neighbour_count))
        self.reductions = backend.subgroup(ranks.shards)
        self.grid: NodeGrid | None = None  # of those that reduce; see [Note: sums inside nodes]
        if packs_gradients:
            self.grid = NodeGrid.of(self.reductions)
        self.packer = Packer()
        self.averages = backend.subgroup(ranks.replicas)
        self.shards = ShardStreams()
        self.timeline = Timeline(backend.telemetry)

    @property
    def shard_rank(self) -> int:
        """Which shard this rank holds."""
        return self.gathers.rank

    @property
    def shard_count(self) -> int:
        return self.gathers.world_size

    @property
    def replica_count(self) -> int:
        """How many ranks hold the same shard."""
        return self.averages.world_size

    @property
    def lends_gradients(self) -> bool:
        """Whether reductions read gradients where they are, in pieces."""
        return (self.averages if self.shard_count == 1 else self.reductions).lends_pieces

    def wait(self, pending: Pending[T], name: str) -> T:
        """The result of a collective; the time spent blocked counts as exposed."""
        return self.timeline.wait(pending, name)
