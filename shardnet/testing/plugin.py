"""The pytest plugin that comes with shardnet: the fixture `cluster`. docs/testing.md shows how to use it.

Every run of pytest where shardnet is installed imports this file, so it imports nothing that takes time.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardnet.testing.cluster_runner import ClusterRunner


@pytest.fixture(scope="session")
def cluster() -> Iterator["ClusterRunner"]:
    """Runs training functions on clusters of threads or processes: `cluster.run(train, 4)`."""
    from shardnet.testing.cluster_runner import ClusterRunner

    runner = ClusterRunner()
    yield runner
    runner.close()
