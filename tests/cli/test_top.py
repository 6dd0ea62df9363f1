"""`shardnet top`: what it draws, and that it goes on when the rendezvous is gone."""

import asyncio
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardnet.cli.main import main
from shardnet.cli.screen import draw
from shardnet.cli.table import as_text
from shardnet.cli.top import watch
from shardnet.config import Timeouts
from shardnet.credentials import Security
from shardnet.histogram import Histogram
from shardnet.loop import LoopThread
from shardnet.observation.chronicle import Chronicle, Event
from shardnet.observation.observer import Observer
from shardnet.observation.rates import RateMeter
from shardnet.observation.views import GONE, UNREACHABLE, ClusterView, Steps, WorkerView
from shardnet.rendezvous.server import RendezvousServer
from shardnet.telemetry import Progress
from shardnet.training import connect
from tests.observation.views import RENDEZVOUS, cluster, stats, worker
from tests.training.workers import PATIENCE_S, rendezvous


def text_of(view: ClusterView, meter: RateMeter | None = None, *events: Event) -> str:
    console = Console(width=160, color_system=None)
    with console.capture() as capture:
        console.print(draw(view, meter or RateMeter(), events))
    return capture.get()


def test_the_picture() -> None:
    progress = Progress(step=30, total_steps=120, loss=2.3104, tokens_per_s=45_200)
    meter = RateMeter()
    for second in (0, 2):
        first = stats(
            step=20 + 5 * second,
            progress=progress,
            bytes_sent=second << 20,
            resident_bytes=300 << 20,
            late={1: 7.0 + 0.4 * second},
            uptime_s=second,
            steps=Steps(Histogram([5 * second, *[0] * 18]), second, 0.34 * second),
            exposed_s=1.0 + 0.34 * second,
        )
        view = cluster(worker(0, first), worker(1, state=UNREACHABLE), joined=3)
        meter.add(float(second), view)
    lines = text_of(view, meter, Event(time.mktime((2026, 1, 2, 3, 4, 5, 0, 0, -1)), "rank 1 is unreachable", True)).splitlines()
    assert lines[0] == "rendezvous 10.0.0.9:7000: serving, plaintext, up 0:09, shardnet 1"
    assert lines[2] == "job lm: running, epoch 1, 2 of 1 to 4 workers, 1 waiting to join"
    assert lines[3].endswith("step 30 of 120, loss 2.310, 45.2k tokens/s, 0:18 left")
    assert lines[4].split() == ["rank", "node", "state", "step", "a", "step", "wait", "late", "sent/s", "received/s", "memory"]
    assert lines[5].split() == ["0", "node-0", "serving", "30", "200.0", "ms", "34%", "-", "1.0", "MiB", "0", "B", "300.0", "MiB"]
    assert lines[6].split() == ["1", "node-1", "unreachable", "-", "-", "-", "40%", "-", "-", "-"], "of the last seconds"
    assert lines[-2:] == ["events", "03:04:05  rank 1 is unreachable"]


@pytest.mark.parametrize(
    ("state", "workers", "joined", "expected"),
    [
        ("forming", (), 1, "forming, epoch 1, 1 of 1 to 4 workers"),
        ("running", (worker(0), worker(1, state=GONE)), 1, "running, epoch 1, 1 of 1 to 4 workers"),
        ("running", (worker(0), worker(1)), 5, "running, epoch 1, 2 of 1 to 4 workers, 3 waiting to join"),
        ("lost", (worker(0, state=GONE),), 0, "lost, epoch 1, 0 of 1 to 4 workers"),
    ],
)
def test_how_many_there_are_is_told_as_status_does(state: str, workers: tuple[WorkerView, ...], joined: int, expected: str) -> None:
    view = cluster(*workers, state=state, joined=joined)
    assert text_of(view).splitlines()[2] == f"job lm: {expected}"
    assert as_text(view).splitlines()[2] == f"job lm: {expected}"


def test_waiting_that_was_not_measured_is_a_dash() -> None:
    view = cluster(worker(0, stats(progress=Progress(30, 120, 2.5, tokens_per_s=45_200.0))))
    row = text_of(view).splitlines()[-1].split()
    assert row[:7] == ["0", "node-0", "serving", "0", "-", "-", "-"]


@pytest.mark.parametrize("value", [math.inf, math.nan, -1.0])
def test_the_odd_numbers_of_one_worker_stop_nobody(value: float) -> None:
    meter = RateMeter()
    for second in (0.0, value):
        steps = Steps(Histogram([round(second != 0.0), *[0] * 18]), second, second)
        progress = Progress(1, 2, value, value, value)
        said = stats(step=1, uptime_s=second, steps=steps, exposed_s=value, progress=progress, late={0: value, 1: value}, bytes_sent=5)
        view = cluster(worker(0, said), worker(1, stats(step=1)))
        meter.add(1.0, view)
    assert "node-1" in text_of(view, meter)


def test_without_jobs_and_of_one_worker() -> None:
    assert "no jobs yet" in text_of(ClusterView("10.0.0.9:7000", "serving", RENDEZVOUS))
    alone = replace(stats(step=3), role="worker", rank=2)
    assert text_of(ClusterView("10.0.0.1:7001", "serving", alone)).splitlines()[-1].split()[:4] == ["2", "-", "serving", "3"]


def test_pictures_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with rendezvous() as address:
        assert main(["top", address, "--interval", "0.05", "--count", "2"]) == 0
    assert capsys.readouterr().out.count(f"rendezvous {address}: serving") == 2
    assert main(["top", "127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err


async def test_workers_are_watched_on_when_the_rendezvous_is_gone() -> None:
    server = RendezvousServer("127.0.0.1:0", timeouts=Timeouts.for_tests())
    await LoopThread.shared().run_here(server.start())
    seen: list[tuple[str, list[tuple[int, str, int]]]] = []

    def show(view: ClusterView, _: RateMeter, __: Chronicle) -> None:
        members = [(each.rank, each.state, -1 if each.stats is None else each.stats.step) for job in view.jobs for each in job.workers]
        seen.append((view.health, members))

    async with connect(rendezvous=server.address, timeouts=Timeouts.for_tests()) as member:
        member.report(step=7)
        watching = asyncio.create_task(watch(Observer(Security(), 1.0), server.address, 0.02, None, show))
        while not seen:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        await LoopThread.shared().run_here(server.aclose())
        while seen[-1][0] != UNREACHABLE:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert seen[0] == ("serving", [(0, "serving", 7)])
        assert seen[-1] == (UNREACHABLE, [(0, "serving", 7)])


def test_ctrl_c_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    with rendezvous() as address:
        master, slave = pty.openpty()
        command = [sys.executable, "-m", "shardnet.cli", "top", address]
        with subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=tmp_path, env={**os.environ, "TERM": "xterm"}
        ) as process:
            try:
                os.close(slave)
                seen = b""
                while b"no jobs yet" not in seen:
                    assert select.select([master], [], [], PATIENCE_S)[0], seen
                    seen += os.read(master, 65536)
                process.send_signal(signal.SIGINT)
                while select.select([master], [], [], PATIENCE_S)[0]:
                    try:
                        seen += os.read(master, 65536)
                    except OSError:  # it is closed
                        break
            except BaseException:
                process.kill()  # `with` waits for it, and nobody reads its output any more
                raise
        os.close(master)
    assert process.returncode == 0
    assert b"\x1b[?1049h" in seen, "a screen of its own"
    assert seen.rstrip().endswith(b"\x1b[?1049l"), seen[-200:]
    assert b"Traceback" not in seen
