"""Namespaces for tests, where this machine lets them be made."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from shardnet.testing.namespaces import NamespacesUnavailable, Network, bridged_nodes


@contextmanager
def nodes_or_skip(count: int, *, rate: str | None = None) -> Iterator[Network]:
    """`bridged_nodes`; skips the test, saying why, where there can be none."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(bridged_nodes(count, rate=rate))
        except NamespacesUnavailable as error:
            pytest.skip(str(error))
        yield network
