"""Fixtures and settings of every test. The guards are a separate plugin, so that tests/test_guards.py can load them into a fresh run."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis  # its plugin imports it at the end of a run otherwise, deep in calls, at which Python 3.11 may fail (gh-106905)
import pytest

import shardnet.quiet  # noqa: F401 - before grpc
from tests.devices import a_thread_each, default_device
from tests.training.workers import nursery

if TYPE_CHECKING:
    from shardnet.testing import ClusterRunner

__all__ = ["a_thread_each", "default_device", "nursery"]

# Some virtual machines announce AMX and then kill a process that uses it, and torch does so for products of 16-bit floats. Without AMX
# these products also have the same bits on more machines. Processes that tests start inherit this; torch reads it at its first product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# The process that starts the tests may ignore these signals: nohup does, and so does a script that runs them in the background. Children
# inherit that, and a test that interrupts one would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# No example has a deadline: on a busy machine any of them may wait for a processor. Where `CI` is set, as `.ci/run` does, the examples are
# the same in each run (Hypothesis' own default there): a run of CI judges the change, and `make test` at a desk looks for new ones.
hypothesis.settings.register_profile("shardnet", deadline=None)
hypothesis.settings.load_profile("shardnet")

# Hypothesis makes an example that fails smaller for up to 300 s. It is shown at the end of that, and only then.
SHRINKING_S = 360

pytest_plugins = ["tests.guards", "tests.hangs"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SHRINKING_S))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish() -> None:
    """Make an optimizer: a process's first one imports torch's compiler, which takes seconds that no single test should pay, and makes
    some hundred thousand objects. They must exist when the guards freeze what has been imported (tests/guards.py), because `elastic.run`
    collects garbage in each epoch."""
    if torch := sys.modules.get("torch"):
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    """See tests/compiling.py."""
    from tests import compiling

    with compiling.nothing_compiled():
        yield


@pytest.fixture
def runner() -> "Iterator[ClusterRunner]":
    """Like the fixture `cluster`, but for one test: processes of `cluster` live as long as the session, and the guards would find them."""
    from shardnet.testing import ClusterRunner

    with contextlib.closing(ClusterRunner()) as runner:
        yield runner
