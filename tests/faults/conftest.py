"""What the fault tests share with others."""

from tests.training.workers import nursery

__all__ = ["nursery"]
