"""Somebody scans a port, talks nonsense to it, or holds it in silence: it soon recovers, and the log stays readable."""

import asyncio
import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.loop import LoopThread
from tests.credentials.made import security
from tests.faults.at_work import at_work
from tests.faults.ledger import Scenario, scenario
from tests.faults.log_lines import heard_lines
from tests.faults.ports import dissolve, mesh_of, ports
from tests.faults.summing import summing
from tests.training.workers import Nursery
from tests.transport.handshakes import be_impatient

SEED = 20_261_129
SHORT = 100
COUNTS = [SHORT, pytest.param(2000, marks=pytest.mark.faults)]
TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits()
BACK_S = 5.0
AT_ONCE = 100
GREETINGS = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x00\x05hello",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\0" * 100,
    b"SSH-2.0-x\r\n",
    b"",
)


async def attack(address: str, count: int) -> float:
    """Open `count` connections, some of which only check that somebody listens while the others say something random, and a quarter as many
    that say nothing. Wait until the port has ended them all; return the time at which the last one connected."""
    rng, where, loop = random.Random(SEED), Address.parse(address), asyncio.get_running_loop()
    last_s = 0.0

    async def connect() -> socket.socket:
        nonlocal last_s
        sock = socket.socket()
        sock.setblocking(False)
        await loop.sock_connect(sock, (where.host, where.port))
        last_s = time.monotonic()
        return sock

    async def stay(said: bytes) -> None:
        with await connect() as sock, suppress(ConnectionError):
            await loop.sock_sendall(sock, said)
            while await loop.sock_recv(sock, 65536):
                pass

    async def talk(turn: asyncio.Semaphore) -> None:
        said = rng.choice(GREETINGS) + rng.randbytes(rng.choice((0, 10, 1000)))
        async with turn:
            if rng.random() < 0.2:
                (await connect()).close()
            else:
                await stay(said)

    async with asyncio.TaskGroup() as callers:
        for _ in range(count // 4):
            callers.create_task(stay(b""))
        turn = asyncio.Semaphore(AT_ONCE)
        for _ in range(count):
            callers.create_task(talk(turn))
    return last_s


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("protection", [Security, security], ids=["plaintext", "TLS"])
def test_the_log(count: int, protection: Callable[[], Security], monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets at most one line per second, while ranks of the attacked process work."""
    if count == SHORT:
        be_impatient(monkeypatch)

    async def run() -> None:
        async with ports(2, security=protection(), timeouts=TIMEOUTS, limits=LIMITS) as pool:
            ranks = await pool.form()
            address, before = mesh_of(ranks[0]).address(0), descriptors()
            async with summing(ranks):
                started_s = time.monotonic()
                with heard_lines() as lines:
                    last_s = await attack(address, count)
                    await until_back(figures, descriptors, before, last_s)
            seconds = time.monotonic() - started_s
            await dissolve(ranks)
        figures.measured = {"lines": len(lines), "seconds": seconds}
        assert len(lines) <= seconds + 1, [line.text for line in lines]
        assert lines or protection is Security

    with scenario(
        f"port scan, garbage and silence under {(protection().credentials and 'TLS') or 'plaintext'}", SEED, kept=count > SHORT
    ) as figures:
        figures.repeats = count
        LoopThread.shared().run(run()).result(300.0)


@pytest.mark.parametrize("count", COUNTS)
def test_descriptors(nursery: Nursery, count: int) -> None:
    """Those of a worker and of a rendezvous, which work meanwhile, are given back."""
    with at_work(nursery) as work, scenario("port scan, garbage and silence: descriptors", SEED, kept=count > SHORT) as figures:
        figures.repeats = count

        async def run() -> None:
            for pid, address in zip(work.processes, (work.workers[0].address, work.rendezvous), strict=True):
                held = psutil.Process(pid).num_fds
                before = held()
                await until_back(figures, held, before, await attack(address, count))

        LoopThread.shared().run(run()).result(300.0)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - Path.iterdir would keep a descriptor open meanwhile


async def until_back(figures: Scenario, held: Callable[[], int], before: int, last_s: float) -> None:
    """Wait until no more descriptors are held than `before`, which must be soon after the last connection."""
    while held() > before:
        assert time.monotonic() <= last_s + BACK_S, f"{held()} descriptors, {before} before"
        await asyncio.sleep(0.05)
    figures.resumed_s.append(time.monotonic() - last_s)
    assert figures.resumed_s[-1] <= BACK_S
