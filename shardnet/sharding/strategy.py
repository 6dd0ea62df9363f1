"""What is sharded."""

from enum import StrEnum
from typing import NoReturn

from shardnet.errors import UsageError


class ShardingStrategy(StrEnum):
    """Which of parameters, gradients and optimizer state are spread over ranks, so that a rank holds only its share."""

    FULL_SHARD = "full_shard"  # all three (ZeRO-3): parameters are gathered for forward and again for backward
    SHARD_GRAD_OP = "shard_grad_op"  # all three between steps (ZeRO-2): gathered for forward, kept until backward is done
    NO_SHARD = "no_shard"  # nothing: every rank holds everything, and gradients are averaged (DDP)
    HYBRID_SHARD = "hybrid_shard"  # as FULL_SHARD within a node; all nodes hold the same and average their gradients

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise UsageError(
            f"{value!r} is not a sharding strategy; choose one of {', '.join(f'ShardingStrategy.{each.name}' for each in cls)}"
        )

    @property
    def frees_after_forward(self) -> bool:
        """Whether a unit's full parameters are freed after its forward, so that there is something to prefetch."""
        return self in (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
