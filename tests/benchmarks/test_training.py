"""Two trainings that should be the same."""

import pytest
import torch

from benchmarks.training import Divergence, check_losses


def test_losses_that_agree_pass() -> None:
    check_losses(torch.tensor([5.5, 4.0]), torch.tensor([5.5, 4.0005]))


@pytest.mark.parametrize("value", [4.01, float("nan")])
def test_the_step_that_differs_is_named(value: float) -> None:
    with pytest.raises(Divergence, match=r"step 1: shardnet's loss is 4\.0"):
        check_losses(torch.tensor([5.5, 4.0, 3.0]), torch.tensor([5.5, value, 3.0]))
