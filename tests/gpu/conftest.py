"""What lives as long as the session is there before the first test looks at what there is."""

import pytest
import torch

from shardnet.testing import ClusterRunner


@pytest.fixture(scope="session", autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available():
        runner: ClusterRunner = request.getfixturevalue("cluster")
        runner.warm_up()
        torch.ones(1, device="cuda")  # opens what the process has of the GPU from then on
