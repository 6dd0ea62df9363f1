"""Every element belongs to exactly one rank's shard, and what that saves."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.zero import OptimizerShard


def bounds(total: int, world_size: int) -> list[tuple[int, int]]:
    shards = [OptimizerShard.for_rank(rank, world_size, total) for rank in range(world_size)]
    return [(shard.start, shard.end) for shard in shards]


def test_a_quarter_of_a_hundred() -> None:
    shard = OptimizerShard.for_rank(0, 4, 100)
    assert (shard.start, shard.end, shard.shard_size) == (0, 25, 25)
    assert shard.owns_param(24)
    assert not shard.owns_param(25)
    assert not shard.owns_param(-1)


def test_what_is_left_over_goes_to_the_first_ranks() -> None:
    assert bounds(10, 3) == [(0, 4), (4, 7), (7, 10)]


def test_bounds_of_a_prime_like_size() -> None:
    edges = [0, 142858, 285716, 428574, 571432, 714289, 857146, 1000003]
    assert bounds(1_000_003, 7) == list(pairwise(edges))


def test_savings_and_bytes_of_a_million() -> None:
    shard = OptimizerShard.for_rank(0, 4, 1_000_000)
    assert shard.memory_savings == 0.75
    assert shard.full_memory_bytes == 8_000_000
    assert shard.shard_memory_bytes == 2_000_000


@pytest.mark.parametrize(("world_size", "gigabytes"), [(1, 2.8), (2, 1.4), (4, 0.7)])
def test_adam_state_of_350_million(world_size: int, gigabytes: float) -> None:
    assert OptimizerShard.for_rank(0, world_size, 350_000_000).shard_memory_bytes == gigabytes * 1e9


@pytest.mark.parametrize(("rank", "world_size", "total"), [(0, 0, 4), (2, 2, 4), (-1, 2, 4), (0, -1, 4), (0, 1, -1)])
def test_impossible_places_are_refused(rank: int, world_size: int, total: int) -> None:
    with pytest.raises(ValueError, match=r"world size|rank|total_params"):
        OptimizerShard.for_rank(rank, world_size, total)


def test_a_shard_is_a_value() -> None:
    shard = OptimizerShard.for_rank(1, 4, 100)
    assert shard == OptimizerShard(rank=1, world_size=4, total_params=100)
    with pytest.raises(dataclasses.FrozenInstanceError):
        shard.rank = 2  # type: ignore[misc]


@given(total=st.integers(0, 10_000), world_size=st.integers(1, 70))
def test_shards_cover_everything_once_and_evenly(total: int, world_size: int) -> None:
    shards = [OptimizerShard.for_rank(rank, world_size, total) for rank in range(world_size)]
    assert [shard.start for shard in shards] == [0, *(shard.end for shard in shards[:-1])]
    assert shards[-1].end == total
    sizes = [shard.shard_size for shard in shards]
    assert max(sizes) - min(sizes) <= 1
    assert sum(shard.shard_memory_bytes for shard in shards) == shards[0].full_memory_bytes
    for element in {0, total // 2, total - 1} & set(range(total)):
        assert sum(shard.owns_param(element) for shard in shards) == 1
