"""Make what lives as long as the session before the first test looks for leaks."""

import os

import pytest
import torch

from shardnet.testing import ClusterRunner

os.environ.setdefault("NCCL_RAS_ENABLE", "0")  # a thread of NCCL's own that keeps sockets as long as the process lives


@pytest.fixture(scope="session", autouse=True)
def warm(request: pytest.FixtureRequest) -> None:
    if torch.cuda.is_available():
        runner: ClusterRunner = request.getfixturevalue("cluster")
        runner.warm_up()
        torch.ones(1, device="cuda")  # from then on the process keeps what this opens for the GPU
