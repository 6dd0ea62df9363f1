"""Real processes, killed and frozen."""

import asyncio
import logging
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shardnet.errors import RendezvousUnavailable
from shardnet.rendezvous.client import join, status
from tests.promises import within_s
from tests.rendezvous.builders import worker
from tests.rendezvous.people import TIMEOUTS, people, rendezvous
from tests.rendezvous.process import command
from tests.shared_loop import on_shared_loop

ROOT = Path(__file__).resolve().parents[2]
FROZEN_WITHIN_S = 3.0 + within_s(1.0)  # design: a frozen or cut-off worker is named within 4 s, 1.5 x suspect_s and a second
DEAD_WITHIN_S = within_s(1.0)


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[tuple["subprocess.Popen[str]", str]]:
    """A process and the first line that it printed; killed at the end. (uvloop's own subprocesses keep a descriptor for good.)"""
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as child:  # noqa: ASYNC220 - forks once
        try:
            assert child.stdout is not None
            yield child, (await asyncio.to_thread(child.stdout.readline)).strip()
        finally:
            child.kill()


@pytest.mark.parametrize(("stop", "limit_s"), [(signal.SIGKILL, DEAD_WITHIN_S), (signal.SIGSTOP, FROZEN_WITHIN_S)])
@on_shared_loop
async def test_worker_that_is_killed_or_frozen_is_named(stop: signal.Signals, limit_s: float) -> None:
    async with (
        rendezvous() as server,
        people(server.address, worker(0)) as (survivor,),
        process(*command("worker", server.address, worker(1))) as (victim, said),
    ):
        assert said == "rank 1"
        await survivor.joined
        started = time.monotonic()
        victim.send_signal(stop)
        assert await survivor.lost.get() == (1, "its connection to the rendezvous broke", False)
        assert time.monotonic() - started < limit_s


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
@on_shared_loop
async def test_worker_that_is_killed_or_frozen_while_joining_frees_its_place(stop: signal.Signals) -> None:
    async with (
        rendezvous() as server,
        people(server.address, worker(0, least=3, most=3)) as (patient,),
        process(*command("worker", server.address, worker(1, least=3, most=3))) as (victim, said),
    ):
        assert said == "waiting 2"
        assert [(await patient.waiting.get()).joined for _ in range(2)] == [1, 2]
        victim.send_signal(stop)
        assert (await patient.waiting.get()).joined == 1
        async with people(server.address, worker(2, least=3, most=3, address="10.0.0.1:7001"), worker(3, least=3, most=3)) as others:
            assert [await p.rank() for p in (patient, *others)] == [0, 1, 2]


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
@on_shared_loop
async def test_rendezvous_that_is_killed_or_frozen_costs_one_warning_each(stop: signal.Signals, caplog: pytest.LogCaptureFixture) -> None:
    warned = asyncio.Semaphore(0)

    def count(record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            warned.release()
        return True

    caplog.handler.addFilter(count)
    async with process(*command("rendezvous")) as (server, address), people(address, worker(0), worker(1)) as workers:
        assert sorted([await w.rank() for w in workers]) == [0, 1]
        server.send_signal(stop)
        for _ in workers:
            await warned.acquire()
        assert all(w.lost.empty() for w in workers)  # nobody is lost except the rendezvous
        for w in workers:
            await w.leave()
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert all(re.match(rf"\[rank [01]/2 epoch 1\] the rendezvous at {address} is gone .*the run goes on", w) for w in warnings), warnings


@on_shared_loop
async def test_frozen_rendezvous_is_unavailable() -> None:
    async with process(*command("rendezvous")) as (server, address):
        assert await status(address) == ()
        server.send_signal(signal.SIGSTOP)
        with pytest.raises(RendezvousUnavailable, match=f"no rendezvous answered at {address} for 1 s"):
            async with join(address, worker(0), timeouts=replace(TIMEOUTS, connect_s=1.0)):
                pass


@on_shared_loop
async def test_rendezvous_killed_while_the_world_forms_and_started_again() -> None:
    async with process(*command("rendezvous")) as (server, address), people(address, worker(0)) as (patient,):
        server.kill()
        await asyncio.to_thread(server.wait)
        async with rendezvous(address), people(address, worker(1)) as (other,):
            assert {await patient.rank(), await other.rank()} == {0, 1}
