"""Fixtures for elastic trainings."""

import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest

from shardnet.checkpoint import Checkpoints
from shardnet.elastic.leavers import Leavers


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


@pytest.fixture
def told_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[bool]]:
    """Of a rank and a number: it gets its order when the ranks have asked so often which of them leave. The list says how it is taken."""

    def prepare(rank: int, times: int) -> list[bool]:
        agree, asked, rounds = Leavers.agree, list[bool](), count(1)

        async def late(self: Leavers, step: int, *, one_stays: bool) -> list[int]:
            leaving = await agree(self, step, one_stays=one_stays)
            if self._backend.rank == rank and next(rounds) == times:
                asked.append(self._departure.ask())
            return leaving

        monkeypatch.setattr(Leavers, "agree", late)
        return asked

    return prepare
