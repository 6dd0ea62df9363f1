"""Training with a sharded optimizer is training in one process on the combined batch."""

from typing import Any

import pytest
import torch

from tests.zero.training import OPTIMIZERS, Run, train_alone, train_sharded


@pytest.fixture(scope="module", params=OPTIMIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(kind: str) -> Run:
    return train_alone(kind)


def check_equal(left: Run, right: Run, *, tolerance: float) -> None:
    assert left.losses == pytest.approx(right.losses, rel=0, abs=tolerance)
    assert list(left.parameters) == list(right.parameters)
    for name, value in left.parameters.items():
        torch.testing.assert_close(value, right.parameters[name], rtol=0, atol=tolerance, msg=name)
    torch.testing.assert_close(left.state, right.state, rtol=0, atol=tolerance)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_steps_equal_one_process(kind: str, alone: Run, world_size: int, micro_batches: int) -> None:
    runs = train_sharded(world_size, kind, micro_batches=micro_batches)
    assert alone.losses[-1] < alone.losses[0] - 0.01  # something was learnt
    for run in runs:
        check_equal(run, alone, tolerance=1e-5)
        check_equal(run, runs[0], tolerance=0)


def test_a_world_of_one_is_the_optimizer_itself_bit_for_bit(kind: str, alone: Run) -> None:
    check_equal(train_sharded(1, kind)[0], alone, tolerance=0)


@pytest.mark.parametrize("choices", [{"overlapping": False}, {"bucket_bytes": 1}, {"bucket_bytes": 5000}, {"split": "parameters"}])
def test_no_choice_changes_a_bit(choices: dict[str, Any]) -> None:
    plain = train_sharded(3, "adamw")
    for run in train_sharded(3, "adamw", **choices):
        check_equal(run, plain[0], tolerance=0)
