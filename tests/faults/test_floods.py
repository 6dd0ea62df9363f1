"""Too much data at once: it is refused before memory is allocated for it, and other links do not notice."""

import asyncio
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil
import pytest

from shardnet.address import Address
from shardnet.config import MIB, Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import PeerLost
from shardnet.transport.dialing import dial
from shardnet.transport.http2 import OPENING, frames, headers
from shardnet.transport.http2.frames import Flags, Type
from shardnet.transport.outbox import PUSH
from tests.faults.flooding import MOST
from tests.faults.ledger import scenario
from tests.faults.log_lines import heard_lines
from tests.faults.ports import dissolve, mesh_of, ports
from tests.shared_loop import on_shared_loop
from tests.training.workers import Nursery, Worker, rendezvous
from tests.transport.handshakes import be_impatient

SEED = 20_261_127
TIMEOUTS, LIMITS = Timeouts.for_tests(), Limits()
GIB = 2**30
HELD_BYTES = 4 * MIB  # the most that may be held for thirty callers and those that answer them


KINDS = ("a group that nobody has made", "collectives to come", "one that is over")


@pytest.mark.parametrize(("kind", "rounds"), [(KINDS[0], 300), *(pytest.param(kind, 5000, marks=pytest.mark.faults) for kind in KINDS)])
def test_a_flood_of_tiny_chunks(nursery: Nursery, kind: str, rounds: int) -> None:
    """A member that floods is cut off, and two others that work together meanwhile do not notice, as far as `rounds` rounds can tell."""
    with scenario(f"a flood of tiny chunks of {kind}", SEED, kept=rounds > 300) as figures, rendezvous() as address, ExitStack() as stack:
        workers = [stack.enter_context(Worker(nursery, address)) for _ in range(3)]
        for number, worker in enumerate(workers):
            worker.tell(
                job="flood",
                world_size=3,
                node=f"node{number}",
                work="call",
                function="tests.faults.flooding:flood",
                arguments=[kind, rounds],
            )
        for worker in workers:
            worker.hear("joined")
        workers.sort(key=lambda worker: worker.rank)
        left = [worker.hear("left") for worker in workers]
        assert [(each["error"], each["leaks"]) for each in left] == [(None, [])] * 3, left
        flooded, _, flooder = (each["result"] for each in left)
        figures.repeats, figures.rss_delta_bytes = flooder["sent"], flooded["grown_bytes"]
        figures.measured = {name: flooded[name] for name in ("quiet_p95_s", "flooded_p95_s")} | {"cut_off_s": flooder["took_s"]}
        assert 0 < flooder["sent"] < MOST
        assert flooded["lost"] == 2
        assert flooded["grown_bytes"] <= 48 * MIB
        assert rounds == 300 or flooded["flooded_p95_s"] <= 1.2 * flooded["quiet_p95_s"]


def request(beginning: bytes) -> bytes:
    """The request that opens a mesh stream, except for the caller's identity."""
    block = headers.HeaderCodec().encode(headers.request("localhost:1", PUSH, ()))
    return beginning + frames.frame(Type.HEADERS, Flags.END_HEADERS, 1, block)


CLAIMS = {
    "a message of 1 GiB": frames.head(5, Type.DATA, 0, 1) + b"\0" + GIB.to_bytes(4),
    "a frame of 16 MiB": frames.head(2**24 - 1, Type.DATA, 0, 1) + b"\0" + (2**24 - 6).to_bytes(4),
    "headers of 16 MiB": frames.head(2**24 - 1, Type.HEADERS, Flags.END_HEADERS, 1),
    "settings of 16 MiB": frames.head(2**24 - 1, Type.SETTINGS, 0, 0),
    "a name of 1 GiB in a header block": frames.frame(Type.HEADERS, Flags.END_HEADERS, 1, b"\x00\x7f\x81\xff\xff\xff\x03"),
    "headers without end": frames.frame(Type.HEADERS, 0, 1) + frames.frame(Type.CONTINUATION, 0, 1, bytes(16384)) * 16,
    "pings without end": frames.frame(Type.PING, 0, 0, bytes(8)) * 10_000,
}


@pytest.mark.parametrize("claim", CLAIMS)
@on_shared_loop
async def test_what_a_stranger_claims(claim: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody allocates memory for it, and the port ends the connection. That holds for grpcio as well as for our own server."""
    be_impatient(monkeypatch)
    async with ports(2, timeouts=TIMEOUTS, limits=LIMITS) as pool:
        ranks = await pool.form()
        address = Address.parse(mesh_of(ranks[0]).address(0))
        claimed = CLAIMS[claim]
        said = (OPENING + claimed, request(OPENING) + claimed, request(frames.PREFACE + frames.settings({})) + claimed)
        await asyncio.gather(*(listen(address, each) for each in said))  # first, for everything that is allocated only once
        before = psutil.Process().memory_info().rss
        with heard_lines(), peak() as peaks:
            await asyncio.gather(*(listen(address, each) for each in said * 10))
        assert peaks[0] <= HELD_BYTES
        assert psutil.Process().memory_info().rss - before <= 8 * MIB
        await dissolve(ranks)


async def listen(address: Address, said: bytes) -> None:
    """Send `said`, and read the answer to its end."""
    connection = await dial(address, Security())
    try:
        with suppress(OSError):  # the port need not read all of it
            await connection.send_all(said)
        with suppress(ConnectionError):
            async with asyncio.timeout(10.0):
                while await connection.receive(65536):
                    pass
    finally:
        connection.close()


@contextmanager
def peak() -> Iterator[list[int]]:
    """The most memory that Python and numpy have held at any time, in bytes."""
    found = list[int]()
    tracemalloc.start()
    try:
        yield found
        found.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


@on_shared_loop
async def test_what_a_member_claims() -> None:
    """On an accepted stream, a message above Limits.max_message_bytes is refused after its first five bytes."""
    async with ports(2, timeouts=TIMEOUTS, limits=LIMITS) as pool:
        ranks = await pool.form()
        call = mesh_of(ranks[1])._outboxes[0]._call
        assert call is not None
        handle = ranks[0].barrier()
        with heard_lines(), peak() as peaks:
            call._writer.control(CLAIMS["a message of 1 GiB"])
            call._flush()
            with pytest.raises(PeerLost, match=f"a message of {GIB} bytes is larger than allowed"):
                await handle
        assert peaks[0] <= HELD_BYTES
        await dissolve(ranks)
