"""Training on several ranks is training in one process on the combined batch."""

import pytest
import torch

from tests.fsdp.training import Run, train_alone, train_sharded


def check_equal(left: Run, right: Run, *, tolerance: float) -> None:
    assert list(left.state) == list(right.state)
    for name, value in left.state.items():
        torch.testing.assert_close(value, right.state[name], rtol=0, atol=tolerance, msg=name)
    assert left.losses == pytest.approx(right.losses, rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def alone() -> Run:
    return train_alone()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_twenty_steps_equal_one_process(alone: Run, world_size: int) -> None:
    runs = train_sharded(world_size)
    assert alone.losses[-1] < alone.losses[0] - 0.01  # something was learnt
    for run in runs:
        check_equal(run, alone, tolerance=1e-5)
        check_equal(run, runs[0], tolerance=0)


def test_a_world_of_one_is_the_unsharded_model_bit_for_bit(alone: Run) -> None:
    check_equal(train_sharded(1)[0], alone, tolerance=0)


def test_a_repeated_run_is_bit_identical() -> None:
    check_equal(train_sharded(3, steps=5)[0], train_sharded(3, steps=5)[0], tolerance=0)


def test_prefetch_and_the_moment_of_making_the_optimizer_change_no_bit() -> None:
    plain = train_sharded(2, steps=5, prefetch=0)[0]
    check_equal(train_sharded(2, steps=5, prefetch=3)[0], plain, tolerance=0)
    check_equal(train_sharded(2, steps=5, explicit=True)[0], plain, tolerance=0)
    check_equal(train_sharded(2, steps=5, optimizer_first=True)[0], plain, tolerance=0)
