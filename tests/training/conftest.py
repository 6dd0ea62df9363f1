"""What tests of `connect()` share: no launcher but their own, and somewhere to meet."""

import os
from collections.abc import Iterator

import pytest

from tests.training.scheduled import without_schedulers
from tests.training.workers import rendezvous


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own launcher or scheduler, if there is one, does not count."""
    for name in os.environ.keys() - without_schedulers(os.environ).keys():
        monkeypatch.delenv(name)


@pytest.fixture
def meeting() -> Iterator[str]:
    with rendezvous() as address:
        yield address
