"""Network namespaces for tests, if this machine allows them."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from shardnet.testing.namespaces import NamespacesUnavailable, Network, bridged_nodes


@contextmanager
def nodes_or_skip(count: int, *, rate: str | None = None) -> Iterator[Network]:
    """`bridged_nodes`, or skip the test and say why if this machine allows none."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(bridged_nodes(count, rate=rate))
        except NamespacesUnavailable as error:
            pytest.skip(str(error))
        yield network
