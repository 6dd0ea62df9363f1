"""The balanced split of a flat buffer over ranks, without padding."""

from shardnet.errors import InvalidRankError, InvalidWorldSizeError


def shard_sizes(numel: int, world_size: int) -> tuple[int, ...]:
    """Elements per rank: `numel // world_size`, and one more for each of the first `numel % world_size` ranks."""
    if world_size < 1:
        raise InvalidWorldSizeError(f"world size must be at least 1, got {world_size}")
    quotient, remainder = divmod(numel, world_size)
    return tuple(quotient + (rank < remainder) for rank in range(world_size))


def shard_bounds(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Start and stop of `rank`'s elements. Over all ranks they cover [0, numel) once, in rank order."""
    if world_size < 1:
        raise InvalidWorldSizeError(f"world size must be at least 1, got {world_size}")
    if not 0 <= rank < world_size:
        raise InvalidRankError(rank, world_size)
    quotient, remainder = divmod(numel, world_size)
    start = rank * quotient + min(rank, remainder)
    return start, start + quotient + (rank < remainder)
