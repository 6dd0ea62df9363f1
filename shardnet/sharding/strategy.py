"""What is sharded."""

from enum import StrEnum


class ShardingStrategy(StrEnum):
    """Which of parameters, gradients and optimizer state a rank holds only its share of."""

    FULL_SHARD = "full_shard"  # all three (ZeRO-3)
