"""Helpers for testing what is built on shardnet; the project's own tests use them, too."""

from shardnet.testing.cluster import local_cluster

__all__ = ["local_cluster"]
