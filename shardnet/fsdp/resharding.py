"""`Resharding`: what becomes of a unit's full parameters between forward and backward."""

from dataclasses import dataclass

from shardnet.errors import UsageError
from shardnet.sharding import ShardingStrategy


@dataclass(frozen=True, slots=True)
class Resharding:
    """Full parameters are freed after forward, unless one of these says that they are kept."""

    keep: bool = False  # whole
    neighbours: int | None = None  # as shards over this many ranks; see [Note: secondary shards]

    @classmethod
    def chosen(cls, reshard_after_forward: bool | int | None, strategy: ShardingStrategy, shard_count: int) -> "Resharding":
        """What the argument of `FSDP` means where `shard_count` ranks share one copy of the parameters.

        Raises UsageError for a value that contradicts the strategy, and for a number that does not divide the ranks.
        """
        if reshard_after_forward is None:
            return cls(keep=not strategy.frees_after_forward)
        if not isinstance(reshard_after_forward, int):
            raise UsageError(f"reshard_after_forward must be a bool or a number of ranks, got {reshard_after_forward!r}")
        if strategy is ShardingStrategy.NO_SHARD:
            raise UsageError(f"reshard_after_forward={reshard_after_forward}: with NO_SHARD there is nothing to reshard; leave it out")
        if strategy is ShardingStrategy.SHARD_GRAD_OP and reshard_after_forward is not False:
            raise UsageError(
                f"reshard_after_forward={reshard_after_forward}: SHARD_GRAD_OP keeps parameters until backward; choose FULL_SHARD instead"
            )
        if isinstance(reshard_after_forward, bool):
            return cls(keep=not reshard_after_forward)
        if not 1 < reshard_after_forward < shard_count or shard_count % reshard_after_forward:
            raise UsageError(
                f"reshard_after_forward={reshard_after_forward}: a number must divide the {shard_count} ranks that share the parameters, "
                "and be neither 1 (use False to keep whole parameters) nor all of these ranks (use True to keep only the shards)"
            )
        return cls(neighbours=reshard_after_forward)
