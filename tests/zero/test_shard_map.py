"""Which rank owns which block; `balanced` compares sizes, for models in which counting blocks is not enough."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.zero import ZeroShardMap

# Parameters of GPT-2 medium with a head that is not tied: 24 blocks, embeddings of 50257 tokens and 1024 positions, a final norm.
BLOCKS = [12_596_224] * 24
EMBEDDING, NORM, HEAD = 50_257 * 1024 + 1024 * 1024, 2048, 50_257 * 1024


def loads(owners: ZeroShardMap, blocks: list[int], embedding: int, norm: int, head: int) -> list[int]:
    """The number of parameters on each rank."""
    held = [sum(blocks[block] for block in owners.blocks_for_rank(rank)) for rank in range(owners.world_size)]
    held[owners.embedding_owner] += embedding
    held[owners.final_norm_owner] += norm
    held[owners.lm_head_owner] += head
    return held


def test_round_robin() -> None:
    owners = ZeroShardMap.round_robin(24, 4)
    assert owners.blocks_for_rank(0) == [0, 4, 8, 12, 16, 20]
    assert [owners.num_blocks_for_rank(rank) for rank in range(4)] == [6, 6, 6, 6]
    assert owners.memory_fraction_for_rank(0) == 0.25
    assert [owners.block_owner(block) for block in range(5)] == [0, 1, 2, 3, 0]


def test_contiguous() -> None:
    owners = ZeroShardMap.contiguous(24, 4)
    assert [owners.blocks_for_rank(rank) for rank in range(4)] == [list(range(first, first + 6)) for first in (0, 6, 12, 18)]


def test_contiguous_with_a_remainder() -> None:
    owners = ZeroShardMap.contiguous(10, 3)
    assert [owners.num_blocks_for_rank(rank) for rank in range(3)] == [4, 3, 3]
    assert [owners.memory_fraction_for_rank(rank) for rank in range(3)] == [0.4, 0.3, 0.3]


def test_who_owns_a_block() -> None:
    owners = ZeroShardMap.contiguous(12, 3)
    assert all(owners.rank_owns_block(0, block) for block in range(4))
    assert not owners.rank_owns_block(0, 4)
    assert owners.rank_owns_block(1, 4)


@pytest.mark.parametrize("make", [ZeroShardMap.round_robin, ZeroShardMap.contiguous])
def test_what_is_no_block_belongs_to_rank_0_by_default(make: Callable[[int, int], ZeroShardMap]) -> None:
    owners = make(5, 2)
    assert (owners.lm_head_owner, owners.final_norm_owner, owners.embedding_owner) == (0, 0, 0)
    assert owners.world_size == 2


def test_no_blocks_and_more_ranks_than_blocks() -> None:
    assert ZeroShardMap.round_robin(0, 3).memory_fraction_for_rank(2) == 0.0
    assert ZeroShardMap.contiguous(2, 4).block_owners == (0, 1)
    assert ZeroShardMap.balanced([], 2).block_owners == ()


def test_impossible_maps_are_refused() -> None:
    for make in (ZeroShardMap.round_robin, ZeroShardMap.contiguous):
        with pytest.raises(ValueError, match="world size"):
            make(4, 0)
        with pytest.raises(ValueError, match="number of blocks"):
            make(-1, 2)
    with pytest.raises(ValueError, match="world size"):
        ZeroShardMap.balanced([1], 0)
    with pytest.raises(ValueError, match="sizes"):
        ZeroShardMap.balanced([3, -1], 2)
    with pytest.raises(ValueError, match="rank 2"):
        ZeroShardMap((0, 1), 2, embedding_owner=2)
    owners = ZeroShardMap.round_robin(4, 2)
    with pytest.raises(ValueError, match="block 4"):
        owners.block_owner(4)
    with pytest.raises(ValueError, match="block -1"):
        owners.rank_owns_block(0, -1)
    with pytest.raises(ValueError, match="rank 2"):
        owners.blocks_for_rank(2)


def test_balanced_looks_at_sizes() -> None:
    """What the fullest rank of four holds: 1.77 times an equal share if blocks are counted, 1.01 times if sizes are compared."""
    counted = ZeroShardMap.round_robin(24, 4)
    weighed = ZeroShardMap.balanced(BLOCKS, 4, embedding_size=EMBEDDING, final_norm_size=NORM, lm_head_size=HEAD)
    by_count, by_size = (loads(owners, BLOCKS, EMBEDDING, NORM, HEAD) for owners in (counted, weighed))
    share = (sum(BLOCKS) + EMBEDDING + NORM + HEAD) / 4
    assert max(by_count) / share == pytest.approx(1.77, abs=0.005)
    assert max(by_size) / share == pytest.approx(1.01, abs=0.005)
    assert max(by_count) / min(by_count) == pytest.approx(2.38, abs=0.005)  # rank 0 over the others
    assert max(by_size) / min(by_size) == pytest.approx(1.02, abs=0.005)


def test_balanced_keeps_a_large_part_alone() -> None:
    owners = ZeroShardMap.balanced([1, 1, 1, 1], 3, embedding_size=4)
    assert [owners.num_blocks_for_rank(rank) for rank in range(3) if rank != owners.embedding_owner] == [2, 2]


@given(
    blocks=st.lists(st.integers(0, 1000), max_size=30),
    around=st.tuples(st.integers(0, 3000), st.integers(0, 50), st.integers(0, 3000)),
    world_size=st.integers(1, 9),
)
def test_balanced_is_within_grahams_bound(blocks: list[int], around: tuple[int, int, int], world_size: int) -> None:
    embedding, norm, head = around
    owners = ZeroShardMap.balanced(blocks, world_size, embedding_size=embedding, final_norm_size=norm, lm_head_size=head)
    held = loads(owners, blocks, embedding, norm, head)
    largest = max([*blocks, *around])
    assert sum(held) == sum(blocks) + sum(around)
    assert max(held) <= sum(held) / world_size + (1 - 1 / world_size) * largest + 1e-6


@given(blocks=st.integers(0, 60), world_size=st.integers(1, 12))
def test_every_block_has_one_owner(blocks: int, world_size: int) -> None:
    for owners in (ZeroShardMap.round_robin(blocks, world_size), ZeroShardMap.contiguous(blocks, world_size)):
        held = [block for rank in range(world_size) for block in owners.blocks_for_rank(rank)]
        assert sorted(held) == list(range(blocks))
        counts = [owners.num_blocks_for_rank(rank) for rank in range(world_size)]
        assert max(counts) - min(counts) <= 1
        assert sum(owners.memory_fraction_for_rank(rank) for rank in range(world_size)) == pytest.approx(1.0 if blocks else 0.0)
