"""Make what lives as long as the session before the first test looks for leaks."""

import pytest

from shardnet.testing import ClusterRunner
from shardnet.testing.relays import Relays


@pytest.fixture(scope="session", autouse=True)
def warm(cluster: ClusterRunner) -> None:
    cluster.warm_up()
    Relays(1).close()  # libuv keeps a descriptor in reserve from the first listener on
