"""Every element of every parameter is held by exactly one rank, and shards end to end are the flat buffer."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardnet.errors import InvalidRankError, InvalidWorldSizeError, SizeMismatchError
from shardnet.sharding import FlatLayout, shard_bounds, shard_sizes

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)


@pytest.mark.parametrize(
    ("numel", "world_size", "sizes"),
    [(7, 3, (3, 2, 2)), (10, 3, (4, 3, 3)), (4, 2, (2, 2)), (2, 4, (1, 1, 0, 0)), (0, 3, (0, 0, 0)), (5, 1, (5,))],
)
def test_the_first_ranks_hold_one_more(numel: int, world_size: int, sizes: tuple[int, ...]) -> None:
    assert shard_sizes(numel, world_size) == sizes


def test_bounds_of_a_prime_like_size() -> None:
    starts = [shard_bounds(1_000_003, rank, 7)[0] for rank in range(7)]
    assert starts == [0, 142858, 285716, 428574, 571432, 714289, 857146]
    assert shard_bounds(1_000_003, 6, 7)[1] == 1_000_003


def test_bad_ranks_and_worlds_are_refused() -> None:
    with pytest.raises(InvalidWorldSizeError):
        shard_sizes(4, 0)
    with pytest.raises(InvalidWorldSizeError):
        shard_bounds(4, 0, 0)
    with pytest.raises(InvalidRankError):
        shard_bounds(4, 2, 2)
    with pytest.raises(InvalidRankError):
        shard_bounds(4, -1, 2)


@settings(max_examples=150)
@given(shapes=SHAPES, world_size=st.integers(1, 7))
def test_slices_cover_every_parameter_once(shapes: list[tuple[int, ...]], world_size: int) -> None:
    layout = FlatLayout([(f"p{index}", shape) for index, shape in enumerate(shapes)], world_size)
    flat = torch.arange(layout.numel)
    shards = [layout.shard(flat, rank) for rank in range(world_size)]
    assert torch.equal(torch.cat(shards), flat)
    assert [shard.numel() for shard in shards] == list(layout.sizes)
    for index, whole in enumerate(layout.views(flat)):
        pieces = [layout.shard_views(shards[rank], rank)[index] for rank in range(world_size)]
        assert torch.equal(torch.cat(pieces), whole.reshape(-1))
        stops = 0
        for rank in range(world_size):
            piece = layout.slices(rank)[index]
            assert piece.shape == tuple(whole.shape)
            assert piece.numel == pieces[rank].numel()
            if piece.numel:
                assert piece.start == stops
                stops = piece.stop
        assert stops == whole.numel()


def test_views_share_the_buffer() -> None:
    layout = FlatLayout([("a", (2, 2)), ("b", (3,))], 2)
    flat = torch.zeros(7)
    layout.views(flat)[1].fill_(5)
    assert flat.tolist() == [0, 0, 0, 0, 5, 5, 5]
    layout.shard(flat, 1).fill_(1)
    assert flat.tolist() == [0, 0, 0, 0, 1, 1, 1]


def test_a_buffer_of_another_size_is_refused() -> None:
    layout = FlatLayout([("a", (2, 2))], 2)
    for wrong in (torch.zeros(5), torch.zeros(2, 2)):
        with pytest.raises(SizeMismatchError):
            layout.views(wrong)
    with pytest.raises(SizeMismatchError):
        layout.shard_views(torch.zeros(3), 0)


def test_shards_of_given_sizes() -> None:
    layout = FlatLayout([("a", (2, 2)), ("b", (3,))], 3, sizes=(0, 5, 2))
    assert [layout.bounds(rank) for rank in range(3)] == [(0, 0), (0, 5), (5, 7)]
    assert [(piece.start, piece.stop) for piece in layout.slices(1)] == [(0, 4), (0, 1)]
    assert [piece.numel for piece in layout.slices(2)] == [0, 2]
    with pytest.raises(InvalidRankError):
        layout.bounds(3)


@pytest.mark.parametrize("sizes", [(3, 4), (3, 3, 2)])
def test_sizes_that_do_not_fit_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(SizeMismatchError, match="3 sizes that sum to 7"):
        FlatLayout([("a", (7,))], 3, sizes=sizes)
