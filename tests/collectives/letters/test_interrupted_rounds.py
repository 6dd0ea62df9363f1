"""Ctrl-C at every place in the thread that calls a collective: the others hear of it, and all can go on."""

import asyncio
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import shardnet
from shardnet.backend import Backend, NodeBuffer, Pending
from shardnet.loop import LoopThread
from shardnet.testing import each_rank, local_cluster
from shardnet.transport.shared_memory import futex
from tests.collectives.letters.rounds import LARGE, LIMITS, SMALL, ones_of

pytestmark = pytest.mark.skipif(not futex.available, reason="mailboxes need Linux on x86-64")

SOURCES = str(Path(shardnet.__file__).parent)
CALLS: dict[str, Callable[[Backend], Pending[Any]]] = {
    "a letter": lambda rank: rank.all_reduce(SMALL),
    "a loan": lambda rank: rank.all_reduce(LARGE),
    "one buffer a node": lambda rank: rank.all_gather_on_node(LARGE),
}


@contextmanager
def ctrl_c_at(line: int) -> Iterator[Callable[[], int]]:
    """Interrupt this thread before it gets to that line of shardnet's. Yields the number of lines that it has got to."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(SOURCES) or frame.f_code.co_name == "__del__":  # nobody gets what is raised there
            return None
        # A `with` comes again at its end, where Python itself looks for signals only when what it holds is let go.
        if event == "line" and not linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith(("with ", "try:")):
            lines += 1
            if lines == line:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: lines
    finally:
        sys.settrace(before)


@pytest.mark.filterwarnings("ignore:.* was never awaited:ResourceWarning")
@pytest.mark.parametrize("kind", [*CALLS, "over streams"])
async def test_ctrl_c_at_any_line(kind: str) -> None:
    call, limits = CALLS.get(kind, CALLS["a letter"]), LIMITS if kind in CALLS else replace(LIMITS, letter_bytes=0)
    async with local_cluster(2, limits=limits) as ranks:
        for line in count(1):
            entered = ranks[0]._group.position
            theirs = call(ranks[1])
            with ctrl_c_at(line) as lines:
                try:
                    mine = call(ranks[0]).wait()
                except KeyboardInterrupt:
                    mine = None
            await LoopThread.shared().run_here(asyncio.sleep(0))  # by then it has entered the collective, if it had begun it
            if mine is None and ranks[0]._group.position == entered:
                mine = await call(ranks[0])  # it had not begun
            ends = [mine, *await asyncio.gather(asyncio.to_thread(theirs.wait, 5.0), return_exceptions=True)]
            assert not isinstance(ends[1], Exception) or "aborted by rank 0: " in str(ends[1]), f"line {line}"
            for end in ends:
                if isinstance(end, NodeBuffer):
                    end.release()
            again = await asyncio.wait_for(each_rank(ranks, lambda rank: rank.all_reduce(SMALL)), 5.0)
            assert torch.equal(again[0], ones_of(2)), f"line {line}"
            if lines() < line:
                break
        assert line > 100
        assert not ranks[0]._group._ledger._ahead
    assert not ranks[0]._group.under_way
