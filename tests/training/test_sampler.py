"""An epoch covers every sample exactly once, and weighted means over ranks are means over samples."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardnet.errors import InvalidRankError, InvalidWorldSizeError, UsageError
from shardnet.training.sampler import ShardedSampler, Share

SIZES = st.tuples(st.integers(1, 200), st.integers(1, 9), st.integers(1, 7))  # samples, batch, world size
SEEDS = st.one_of(st.none(), st.integers(0, 2**40))


def samplers(samples: int, batch: int, world_size: int, seed: int | None) -> list[ShardedSampler]:
    return [ShardedSampler(samples, batch=batch, rank=rank, world_size=world_size, seed=seed) for rank in range(world_size)]


def counted(share: Share) -> tuple[int, ...]:
    return share.indices if share.weight > 0 else ()


@given(SIZES, SEEDS, st.integers(0, 3))
def test_an_epoch_covers_every_sample_exactly_once(sizes: tuple[int, int, int], seed: int | None, epoch: int) -> None:
    ranks = [list(sampler.epoch(epoch)) for sampler in samplers(*sizes, seed)]
    assert len({len(shares) for shares in ranks}) == 1, "ranks must run equally many steps, or their collectives hang"
    seen = sorted(index for shares in ranks for share in shares for index in counted(share))
    assert seen == list(range(sizes[0]))


@given(SIZES, SEEDS)
def test_mean_over_ranks_of_weighted_losses_is_the_mean_over_samples(sizes: tuple[int, int, int], seed: int | None) -> None:
    def loss(index: int) -> float:
        return math.sin(index) + 2

    for shares in zip(*(sampler.epoch(0) for sampler in samplers(*sizes, seed)), strict=True):
        weighted = [share.weight * sum(map(loss, share.indices)) / len(share.indices) for share in shares]
        samples = [index for share in shares for index in counted(share)]
        assert len(samples) == shares[0].batch == sum(share.samples for share in shares)
        assert math.isclose(sum(weighted) / len(shares), sum(map(loss, samples)) / len(samples), rel_tol=1e-12)


@given(SIZES, SEEDS)
def test_no_share_is_empty_or_larger_than_the_batch(sizes: tuple[int, int, int], seed: int | None) -> None:
    for sampler in samplers(*sizes, seed):
        assert all(1 <= len(share.indices) <= sizes[1] for share in sampler.epoch(0))


def test_a_rank_without_samples_runs_one_with_weight_zero() -> None:
    last = [list(sampler.epoch(0))[-1] for sampler in samplers(samples=9, batch=2, world_size=4, seed=None)]
    assert last[0] == Share((8,), 4.0, 1)
    assert last[1:] == [Share((8,), 0.0, 1)] * 3


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int, world_size: int) -> list[int]:
        ranks = [list(s.epoch(epoch)) for s in samplers(96, 8 // world_size, world_size, seed)]
        return [index for shares in zip(*ranks, strict=True) for index in sorted(sum((s.indices for s in shares), ()))]

    assert order(1, 0, 1) == order(1, 0, 2) == order(1, 0, 4)
    assert order(1, 0, 1) != order(1, 1, 1)
    assert order(1, 0, 1) != order(2, 0, 1)


def test_steps_count_on_over_epochs() -> None:
    sampler = ShardedSampler(10, batch=2, rank=1, world_size=2, seed=3)
    assert sampler.steps_per_epoch == 3
    assert [sampler.share(step) for step in range(6)] == [*sampler.epoch(0), *sampler.epoch(1)]


@pytest.mark.parametrize(("samples", "batch"), [(0, 1), (1, 0), (-1, 4)])
def test_nothing_to_deal_is_refused(samples: int, batch: int) -> None:
    with pytest.raises(UsageError, match="at least one sample"):
        ShardedSampler(samples, batch=batch, rank=0, world_size=1)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(InvalidRankError):
        ShardedSampler(4, batch=1, rank=2, world_size=2)
    with pytest.raises(InvalidWorldSizeError):
        ShardedSampler(4, batch=1, rank=0, world_size=0)
