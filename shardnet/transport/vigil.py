"""Ranks that watch each other, where there is no rendezvous that sees them all.

[Note: vigils] Each rank keeps a call open to one or two others, through grpcio, whose threads answer pings even while Python code holds
the interpreter lock. When a rank is frozen or cut off, its watchers' pings stay unanswered, and the call ends on the watchers' side. They
tell all others, which have noticed the silence themselves: that makes two witnesses ([Note: two witnesses] in pulse.py). A watcher may
lose a call only because its own interpreter lock was held: then nobody else has noticed any silence, and the rank calls again.
"""

import asyncio
import logging
from collections.abc import Callable

import grpc

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.pb import mesh_pb2
from shardnet.topology import Member, Topology
from shardnet.transport.hello import Hello
from shardnet.transport.options import channel_options
from shardnet.transport.rpc_errors import reason

log = logging.getLogger(__name__)
ATTEND = "/shardnet.v1.Mesh/Attend"
_PAUSE_S = 0.5


def watchers_of(topology: Topology) -> list[int]:
    """The ranks that watch this one: the next rank, and the next rank on another node, if there is any."""
    after = [(topology.rank + step) % topology.world_size for step in range(1, topology.world_size)]
    far = [rank for rank in after if topology.members[rank].node_group != topology.me.node_group]
    return list(dict.fromkeys(after[:1] + far[:1]))


async def attend(
    watcher: Member,
    hello: Hello,
    security: Security,
    timeouts: Timeouts,
    limits: Limits,
    *,
    on_watched: Callable[[], object],
    is_over: Callable[[], bool],
) -> None:
    """Let a peer watch this rank until `is_over()` is true, or until this is cancelled; when the call breaks, call again. `on_watched` is
    called each time that the peer has taken the call."""
    channel = security.channel(watcher.address, channel_options(timeouts, limits), to=Role.WORKER)
    method = channel.unary_stream(
        ATTEND,
        request_serializer=mesh_pb2.AttendRequest.SerializeToString,
        response_deserializer=mesh_pb2.AttendReply.FromString,
    )
    try:
        while not is_over():
            call = method(mesh_pb2.AttendRequest(), metadata=grpc.aio.Metadata(*hello.metadata()))
            try:
                await call.initial_metadata()
                on_watched()
                await call.read()  # the peer sends nothing: this ends with the call
            except grpc.aio.AioRpcError as error:
                log.debug("rank %d does not watch rank %d any more: %s", watcher.rank, hello.source, reason(error))
            await asyncio.sleep(_PAUSE_S)
    finally:
        await channel.close()
