"""A save rests between its pieces of work while a training goes on, but not when somebody waits for it."""

import asyncio
import itertools
import threading
import time
from pathlib import Path

import pytest

from shardnet.backend import Backend
from shardnet.checkpoint.idle_thread import Leisure
from shardnet.testing import each_rank, local_cluster
from tests.checkpoint.training import Layout, Training

LONG_S = 1000.0


@pytest.fixture
def slow_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece of work seems to take so long that the rest after it would outlast any test."""
    monkeypatch.setattr(time, "thread_time", itertools.count(LONG_S, LONG_S).__next__)


@pytest.mark.usefixtures("slow_work")
def test_rests_last_until_somebody_waits() -> None:
    leisure, rests = Leisure(), list[int]()

    def work() -> None:
        for number in range(3):
            leisure.rest()
            rests.append(number)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(0.05)
    assert rests == []
    leisure.end()
    thread.join(10.0)
    assert rests == [0, 1, 2]


def test_a_thread_rests_as_its_share_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    leisure, waited_s = Leisure(), list[float]()
    monkeypatch.setattr(leisure._is_over, "wait", waited_s.append)
    monkeypatch.setattr(time, "thread_time", iter([0.01, 0.02, 0.05, 0.05]).__next__)
    leisure.rest()
    leisure.rest()
    shares = [worked_s / (worked_s + rested_s) for worked_s, rested_s in zip([0.01, 0.03], waited_s, strict=True)]
    assert shares == pytest.approx([0.02, 0.02])


@pytest.mark.usefixtures("slow_work")
@pytest.mark.parametrize("end", ["wait", "save", "abandon"])
async def test_a_save_ends_soon_once_it_is_waited_for(end: str, tmp_path: Path) -> None:
    async def train(backend: Backend) -> int:
        async with Training(backend, tmp_path, Layout(2)) as training:
            await training.checkpoints.save(1)
            await asyncio.wait([training.checkpoints._writing], timeout=0.05)
            assert training.checkpoints.is_saving
            if end == "wait":
                await training.checkpoints.wait()
            elif end == "save":
                await training.checkpoints.save(2)
                await training.checkpoints.wait()
            else:
                await training.checkpoints.abandon()
            assert not training.checkpoints.is_saving
            found = await training.checkpoints.load()
            return 0 if found is None else found.step

    async with local_cluster(2) as ranks:
        assert await each_rank(ranks, train) == [{"wait": 1, "save": 2, "abandon": 0}[end]] * 2
