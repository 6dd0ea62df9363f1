"""Helpers for testing what is built on shardnet; the project's own tests use them, too."""

from shardnet.testing import reference
from shardnet.testing.bits import bits, same_bits
from shardnet.testing.cluster import jitter_cluster, local_cluster, loopback_cluster
from shardnet.testing.namespaces import NamespacesUnavailable, bridged_nodes
from shardnet.testing.ranks import each_error, each_rank

__all__ = [
    "NamespacesUnavailable",
    "bits",
    "bridged_nodes",
    "each_error",
    "each_rank",
    "jitter_cluster",
    "local_cluster",
    "loopback_cluster",
    "reference",
    "same_bits",
]
