"""A rendezvous or a worker as a process that tests kill and freeze: `python -m tests.rendezvous.process rendezvous|worker …`.

Prints one line when it is ready, then stays until its standard input closes, so that none outlives its test.
"""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardnet.config import Timeouts
from shardnet.credentials import Security
from shardnet.rendezvous.client import join
from shardnet.rendezvous.request import JoinRequest
from shardnet.rendezvous.server import RendezvousServer
from shardnet.rendezvous.store import SqliteStore
from shardnet.testing.namespaces import Namespace

ROOT = Path(__file__).resolve().parents[2]
TIMEOUTS = Timeouts.for_tests()


async def rendezvous(listen: str = "127.0.0.1:0", state: str = "") -> None:
    store = SqliteStore(Path(state)) if state else None
    async with RendezvousServer(listen, timeouts=TIMEOUTS, store=store, security=Security(insecure=True)) as server:
        print(server.address, flush=True)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)  # as `shardnet rendezvous` does
        closes = asyncio.ensure_future(_until_input_closes())
        stops = asyncio.ensure_future(stopped.wait())
        await asyncio.wait({closes, stops}, return_when=asyncio.FIRST_COMPLETED)
    if stopped.is_set():
        os._exit(0)  # a thread is still reading


async def worker(address: str, request: JoinRequest) -> None:
    membership = join(address, request, timeouts=TIMEOUTS, on_waiting=lambda waiting: print("waiting", waiting.joined, flush=True))
    async with membership:
        print("rank", membership.topology.rank, flush=True)
        await _until_input_closes()


async def _until_input_closes() -> None:
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


def command(role: str, address: str = "", request: JoinRequest | None = None, *, state: Path | None = None) -> list[str]:
    """The command line of a process of this module."""
    fields = [json.dumps(dataclasses.asdict(request))] if request else []
    given = [text for text in (address, *fields, str(state or "")) if text]
    return [sys.executable, "-m", "tests.rendezvous.process", role, *given]


@contextmanager
def rendezvous_process(
    listen: str, state: Path | None = None, namespace: Namespace | None = None
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A rendezvous and its address; killed at the end."""
    arguments = command("rendezvous", listen, state=state)
    arguments = arguments if namespace is None else [*namespace.command(*arguments)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


if __name__ == "__main__":
    if sys.argv[1] == "rendezvous":
        asyncio.run(rendezvous(*sys.argv[2:]))
    else:
        asyncio.run(worker(sys.argv[2], JoinRequest(**json.loads(sys.argv[3]))))
