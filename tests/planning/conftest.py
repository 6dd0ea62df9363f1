"""What tests that train share with those of FSDP."""

from tests.fsdp.conftest import _first_optimizer

__all__ = ["_first_optimizer"]
