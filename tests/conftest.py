"""What every test gets. The guards are a plugin of their own, so that tests/test_guards.py can load them into a fresh run."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis  # noqa: F401 - its plugin imports it at the end of a run otherwise, deep in calls, at which Python 3.11 may fail (gh-106905)
import pytest

import shardnet.quiet  # noqa: F401 - before grpc
from tests.devices import a_thread_each, default_device
from tests.training.workers import nursery

if TYPE_CHECKING:
    from shardnet.testing import ClusterRunner

__all__ = ["a_thread_each", "default_device", "nursery"]

# Virtual machines exist that announce AMX and then end a process for using it, as torch does for products of 16-bit floats. Without it
# these also have the same bits on more machines. What the tests start inherits this; torch reads it with its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Who starts the tests may ignore these, as nohup does and a script that runs them in the background. Children inherit that, and tests that
# interrupt one would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["tests.guards"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    """A process's first optimizer imports torch's compiler: seconds, which no single test should pay, and objects by the hundred thousand.
    They must be there when the guards freeze what has been imported (tests/guards.py): `elastic.run` searches for garbage in each epoch."""
    if torch := sys.modules.get("torch"):
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """By torch.compile before the test, and nothing again and again in it."""
    import torch

    torch.compiler.reset()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.compiler.reset()


@pytest.fixture
def runner() -> "Iterator[ClusterRunner]":
    """As the fixture `cluster`, for a test alone: that one's processes live as long as the session, and the guards would find them."""
    from shardnet.testing import ClusterRunner

    with contextlib.closing(ClusterRunner()) as runner:
        yield runner
