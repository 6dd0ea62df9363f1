"""What every test gets. The guards are a plugin of their own, so that tests/test_guards.py can load them into a fresh run."""

import shardnet  # noqa: F401 - before grpc, which reads from the environment that shardnet sets how much it prints
from tests.training.workers import nursery

__all__ = ["nursery"]

pytest_plugins = ["tests.guards"]
