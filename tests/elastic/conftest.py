"""Fixtures for elastic trainings."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from shardnet.checkpoint import Checkpoints


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that writes no file before this is set."""
    write, works = Checkpoints._write_file, threading.Event()

    def late(self: Checkpoints, checkpoint: str) -> dict[str, Any]:
        works.wait()
        return write(self, checkpoint)

    monkeypatch.setattr(Checkpoints, "_write_file", late)
    yield works
    works.set()
