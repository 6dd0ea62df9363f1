"""What tests with worker processes share."""

from tests.training.workers import nursery

__all__ = ["nursery"]
