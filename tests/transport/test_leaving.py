"""A rank that is done leaves when its peers have what it sent, or when that data no longer moves."""

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shardnet.config import KIB, MIB, Limits, Timeouts
from shardnet.credentials import Security
from shardnet.topology import Member, Topology
from shardnet.transport.connection import PlainConnection
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.hello import Hello
from shardnet.transport.http2 import Call, frames
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.outbox import Outbox
from shardnet.wire import Chunk
from tests.promises import within_s
from tests.transport.http2.test_call import sockets

TIMEOUTS, LIMITS = Timeouts(drain_s=0.4), Limits()
GOODBYE = Chunk(1, 0, 0)


@contextmanager
def stream() -> Iterator[tuple[GrpcMesh, Call, socket.socket]]:
    """Rank 0's mesh with an open stream to a rank 1 whose bytes the test takes, a few at a time, and which says nothing."""
    members = tuple(Member(rank, rank, 0, f"127.0.0.1:{rank + 1}", "node", f"w{rank}") for rank in range(2))
    mesh = GrpcMesh("job", Topology(1, 0, members), MeshService(TIMEOUTS), Security(), TIMEOUTS, LIMITS)
    near, far = sockets()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * MIB)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * KIB)
    outbox = Outbox(members[1], Hello("job", 1, 0, 1, "w0", ""), Security(), TIMEOUTS, LIMITS)
    outbox._call = call = Call(PlainConnection(near), LIMITS)
    call._writer.widen(0, 10**9)
    call._writer.set_initial_window(frames.MAX_WINDOW)
    mesh._outboxes[1] = outbox
    with far:
        yield mesh, call, far
    call.close()


async def test_it_stays_while_its_peer_takes_what_was_sent() -> None:
    """The link is so slow that it takes longer than drain_s, and the last collective has ended here, but not on the peer."""
    with stream() as (mesh, call, far):
        await call.send(bytes(2 * MIB))
        leaving, begin = asyncio.ensure_future(mesh._take_leave(1, GOODBYE)), time.monotonic()
        while time.monotonic() - begin < 3 * TIMEOUTS.drain_s:
            await asyncio.get_running_loop().sock_recv(far, 16 * KIB)
            await asyncio.sleep(0.015)
        assert call.outgoing_bytes
        assert not leaving.done()
        await leaving  # now that nothing moves any more


async def test_it_does_not_stay_for_a_peer_that_takes_nothing() -> None:
    with stream() as (mesh, call, _):
        await call.send(bytes(2 * MIB))
        begin = time.monotonic()
        await mesh._take_leave(1, GOODBYE)
        assert TIMEOUTS.drain_s <= time.monotonic() - begin < TIMEOUTS.drain_s + within_s(0.8)
        assert call.outgoing_bytes
