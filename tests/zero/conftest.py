"""What the tests of the sharded optimizer share."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _first_optimizer() -> None:
    """Making the process's first optimizer imports torch's compiler: seconds, which no single test should pay."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
