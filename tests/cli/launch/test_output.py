"""One stream of a worker, from its pipe to the console."""

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shardnet.cli.launch import tracebacks as module
from shardnet.cli.launch.console import Console
from shardnet.cli.launch.job import Job
from shardnet.cli.launch.output import Output
from shardnet.cli.launch.pipe import Pipe
from shardnet.cli.launch.place import Place
from shardnet.cli.launch.start import Spawn
from shardnet.cli.launch.tracebacks import Tracebacks
from tests.cli.launched import PATIENCE_S

HEAD = ["[0] Traceback (most recent call last):", '[0]   File "train.py", line 3, in main']
BEGUN = b'Traceback (most recent call last):\n  File "train.py", line 3, in main\n'
Write = Callable[[bytes], None]


@asynccontextmanager
async def pumped(err: io.StringIO) -> AsyncIterator[Write]:
    """Everything that is written goes to `err`, and has arrived there at the end."""
    with Console(io.StringIO(), err) as console:
        output = Output(console, console.err, lambda _: "[0] ", Tracebacks(console.told, lambda: "rank 0"))
        async with Pipe() as pipe, asyncio.TaskGroup() as tasks:
            tasks.create_task(output.pump(pipe))
            yield lambda data: _write(pipe, data)
            pipe.close_writer()


def _write(pipe: Pipe, data: bytes) -> None:
    assert os.write(pipe.write_fd, data) == len(data)


async def until_shown(err: io.StringIO, lines: list[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while err.getvalue().splitlines() != lines:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)


async def test_what_is_held_is_shown_though_no_more_comes() -> None:
    err = io.StringIO()
    async with pumped(err) as write:
        write(BEGUN)
        await until_shown(err, HEAD)


async def test_the_rank_that_torch_puts_before_a_traceback_is_left_out() -> None:
    err = io.StringIO()
    async with pumped(err) as write:
        write(b"".join(b"[rank0]: " + line for line in BEGUN.splitlines(keepends=True)) + b"[rank0]: ValueError: own\n[rank1]: other\n")
    assert err.getvalue().splitlines() == [*HEAD, "[0] ValueError: own", "[0] [rank1]: other"]


async def test_it_is_shown_when_the_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_S", 10 * PATIENCE_S)
    err = io.StringIO()
    async with pumped(err) as write:
        write(BEGUN + b"ValueError: no end of a line")
    assert err.getvalue().splitlines() == [*HEAD, "[0] ValueError: no end of a line"]


async def test_a_progress_bar_does_not_overtake_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELD_S", 10 * PATIENCE_S)
    err = io.StringIO()
    async with pumped(err) as write:
        write(BEGUN + b" 50 %\r 51 %\n")
        await until_shown(err, [*HEAD, "[0]  50 %", "[0]  51 %"])


async def test_a_worker_that_is_replaced_leaves_nothing_to_refer_to() -> None:
    """Otherwise another worker's traceback could refer to that of a worker that is gone."""
    with Console(io.StringIO(), io.StringIO()) as console:
        place = Place(0, Job("train.py"), "127.0.0.1:1", Spawn((sys.executable, "-c", "")), console)
        first, second = object(), object()
        await place.run()
        console.told.whose("a traceback", first, "rank 0")
        assert console.told.whose("a traceback", second, "rank 1") == "rank 0"
        await place.run()
        assert console.told.whose("a traceback", second, "rank 1") is None
