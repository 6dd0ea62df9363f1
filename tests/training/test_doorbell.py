"""SIGUSR1 to a process that is in `connect()`, and what it says then."""

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardnet
from shardnet.config import Timeouts
from shardnet.flight import Flight, Party
from shardnet.loop import LoopThread
from shardnet.telemetry import Telemetry
from shardnet.topology import Member, Topology
from shardnet.training.diagnosis import Diagnosis
from shardnet.training.doorbell import _is_taken, answering
from tests.training.workers import PATIENCE_S, Nursery

TIMEOUTS = Timeouts(connect_s=10.0, join_s=20.0, suspect_s=0.3, lost_s=30.0, collective_s=15.0, drain_s=1.0)


async def ring(capsys: pytest.CaptureFixture[str]) -> str:
    """What this process says."""
    os.kill(os.getpid(), signal.SIGUSR1)
    said = ""
    async with asyncio.timeout(10.0):
        while "end of the report of process" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
    return said


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.01)


async def test_a_stuck_rank_says_for_whom_and_shows_everything(meeting: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One of its threads blocks in the collective's wait. The second member in this process finds that the first has taken the signal."""
    told = asyncio.Event()
    stuck: list[shardnet.Cluster] = []

    async def member(*, late: bool) -> None:
        async with shardnet.connect(rendezvous=meeting, min_world_size=2, max_world_size=2, timeouts=TIMEOUTS) as cluster:
            cluster.report(step=7)
            await cluster.backend.all_reduce(torch.ones(2), label="fine")
            if late:
                await told.wait()
            else:
                stuck.append(cluster)
            await asyncio.to_thread(cluster.backend.barrier(label="stuck").wait)
            await told.wait()

    first = asyncio.create_task(member(late=False))
    await asyncio.sleep(0)  # now it takes the signal
    second = asyncio.create_task(member(late=True))
    await until(lambda: stuck and stuck[0].telemetry.waiting)
    said = await ring(capsys)
    told.set()
    await asyncio.gather(first, second)
    rank = stuck[0].rank
    assert said.startswith(f"[rank {rank}/2 epoch 1 step 7] process {os.getpid()} reports what it is doing (SIGUSR1)\n")
    assert re.search(
        rf"collectives under way:\n  waits \d\.\d s in barrier #1 of stuck for rank {1 - rank} \(at #1, last entered all_red", said
    )
    assert re.search(r"s ago: all_reduce #0 of fine, step 7, sent 8 bytes: done, took \d+\.\d ms\n", said)
    assert re.search(r"tasks of the program's loop:\n(  .*\n)*  Task-\d+.*: .*\(\S+\.py:\d+\)", said)
    assert re.search(r"tasks of shardnet's loop:\n(  .*\n)*  Task-\d+, .*: GrpcMesh\._run \(grpc_mesh\.py:\d+\) > Outbox\.run ", said)
    assert re.search(r"\n  asyncio_\d+ \(\d+\):\n(    .*\n)*.*pending.py\", line \d+, in wait\n", said)
    assert re.search(r"stack of the thread that got the signal:\n  Stack \(most recent call first\):\n    File ", said)


@pytest.mark.timeout(120)
def test_a_process_whose_main_thread_hangs_in_c_says_where(nursery: Nursery, tmp_path: Path) -> None:
    nursery.call("tests.training.hanging:hang", str(tmp_path / "said"), within_s=PATIENCE_S)
    said = (tmp_path / "said").read_text()
    assert said.startswith("[rank 0/1 epoch 1 step 12] process ")
    (main,) = re.findall(r"\n  MainThread \(\d+\):\n((?:    .*\n)+)", said)
    assert main.splitlines()[-2].endswith("in _enter")
    assert main.splitlines()[-1].strip() == "lock(mutex)"
    assert re.search(r'stack of the thread that got the signal:\n  Stack .*\n    File ".*hanging.py", line \d+ in _enter', said)


def nothing(found: str) -> str:
    return ""


def test_the_handler_is_taken_and_given_back() -> None:
    assert not _is_taken()
    with answering(nothing):
        assert _is_taken()
        with answering(nothing):
            assert threading.active_count() == before_count() + 1
        assert _is_taken()
    assert not _is_taken()


def before_count() -> int:
    return sum(thread.name != "shardnet-doorbell" for thread in threading.enumerate())


def test_a_handler_of_the_programs_stays_whenever_it_came() -> None:
    heard: list[int] = []

    def handler(number: int, frame: object) -> None:
        heard.append(number)

    def listen() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)

    try:
        with answering(nothing):
            signal.signal(signal.SIGUSR1, handler)
        listen()
        with answering(nothing):
            listen()
        listen()
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert heard == [signal.SIGUSR1] * 3


async def test_other_threads_than_the_main_one_leave_the_signal_alone() -> None:
    async def inside() -> bool:
        async with shardnet.connect():
            return _is_taken()

    assert await inside()
    assert not await asyncio.to_thread(asyncio.run, inside())


async def test_who_still_joins_answers_too(capsys: pytest.CaptureFixture[str], meeting: str) -> None:
    """Otherwise the signal would end it."""

    async def alone() -> None:
        async with shardnet.connect(rendezvous=meeting, min_world_size=2, max_world_size=2, timeouts=TIMEOUTS):
            pass

    joining = asyncio.create_task(alone())
    await until(_is_taken)
    assert (await ring(capsys)).startswith("[no rank yet] ")
    joining.cancel()
    await asyncio.wait([joining])
    assert not _is_taken()


async def test_what_goes_wrong_in_saying_so_ends_nothing(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    broken = True

    def text(found: str) -> str:
        if broken:
            raise ValueError
        return Diagnosis().text(found)

    with answering(text):
        os.kill(os.getpid(), signal.SIGUSR1)
        await until(lambda: caplog.records)
        assert caplog.records[0].getMessage() == "this process could not report what it is doing (SIGUSR1)"
        broken = False
        assert "end of the report of process" in await ring(capsys)


async def test_the_last_twenty_are_listed_and_all_that_are_under_way() -> None:
    telemetry, diagnosis, party = Telemetry(), Diagnosis(), Party(1, 0, (0, 1))
    diagnosis.about(telemetry, lambda: Topology(1, 0, (Member(0, 0, 0, "127.0.0.1:1", "n", "i"),)))
    for number in range(30):
        flight = telemetry.flights.begin(Flight(party, number, "barrier", "", 0, 1))
        if number:
            telemetry.flights.end(flight, 2, None)
    said = LoopThread.shared().run(_text(diagnosis)).result()
    assert re.search(r"under way:\n  barrier #0: begun, [\d.]+ s ago\n", said)
    assert re.findall(r"ago: barrier #(\d+), ", said) == [str(number) for number in range(10, 30)]


async def _text(diagnosis: Diagnosis) -> str:
    return diagnosis.text()
