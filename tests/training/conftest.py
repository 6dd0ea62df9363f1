"""Fixtures of tests of `connect()`: no launcher except their own, and a place to meet."""

import os
from collections.abc import Iterator

import pytest

from tests.training.scheduled import without_schedulers
from tests.training.workers import rendezvous


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the launcher or scheduler that runs the tests, if there is one."""
    for name in os.environ.keys() - without_schedulers(os.environ).keys():
        monkeypatch.delenv(name)


@pytest.fixture
def meeting() -> Iterator[str]:
    with rendezvous() as address:
        yield address
