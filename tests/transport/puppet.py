"""A rank of which a test decides every frame: the other end of a real mesh's streams."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace

import grpc

from shardnet.backend.cluster import ClusterBackend
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.pb import mesh_pb2, stats_pb2
from shardnet.topology import Member, Topology
from shardnet.transport.endpoint import Endpoint
from shardnet.transport.grpc_mesh import GrpcMesh
from shardnet.transport.hello import ACCEPTED, Hello, terms_of
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.options import channel_options, server_options
from shardnet.wire import Chunk, decode, encode

JOB = "puppet theatre"
LIMITS = Limits(chunk_bytes=64, eager_bytes=32, max_message_bytes=128 * 1024, letter_bytes=0)  # a puppet has no mailbox
TIMEOUTS = replace(Timeouts.for_tests(), connect_s=5.0)
PUSH = "/shardnet.v1.Mesh/Push"


class Stream:
    """An open call of Push."""

    def __init__(self, channel: grpc.aio.Channel, hello: Hello | None) -> None:
        self.call: grpc.aio.StreamUnaryCall[bytes, bytes] = channel.stream_unary(PUSH)(
            metadata=hello.metadata() if hello is not None else ()
        )

    async def accepted(self) -> bool:
        return ACCEPTED in tuple(await self.call.initial_metadata() or ())

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        return await self.call.code(), await self.call.details() or ""


@dataclass
class Theatre:
    """Rank 0 is a real backend; rank 1 is the puppet, which has completed its handshake and done nothing more."""

    backend: ClusterBackend
    mesh: GrpcMesh
    service: MeshService
    channel: grpc.aio.Channel  # to rank 0
    hello: Hello  # rank 1's
    stream: Stream  # from rank 1 to rank 0, accepted
    heard: "asyncio.Queue[Chunk]"  # what rank 0 has sent to rank 1

    async def send(self, chunk: Chunk) -> None:
        await self.send_bytes(b"".join(encode(chunk)))

    async def send_bytes(self, frame: bytes) -> None:
        await self.stream.call.write(frame)

    async def announce_like(self, heard: Chunk, *, sends: int = 0, expects: int = 0) -> None:
        """Answer an announcement: rank 1 is in that collective, too."""
        assert heard.control is not None
        announcement = mesh_pb2.Announcement(signature=heard.control.announcement.signature, send_bytes=sends, expect_bytes=expects)
        await self.send(Chunk(heard.epoch, heard.group, heard.sequence, control=mesh_pb2.Control(announcement=announcement)))

    def open(self, hello: Hello | None) -> Stream:
        """Another stream to rank 0."""
        return Stream(self.channel, hello)


@asynccontextmanager
async def theatre(timeouts: Timeouts = TIMEOUTS) -> AsyncIterator[Theatre]:
    """Runs on shardnet's loop. The backend is aborted at the end."""
    async with AsyncExitStack() as stack:
        heard = asyncio.Queue[Chunk]()
        service = MeshService(timeouts)
        addresses = [await _rank_0(stack, timeouts, service), await _puppet(stack, timeouts, heard)]
        members = tuple(Member(rank, rank, 0, address, "node", f"worker{rank}") for rank, address in enumerate(addresses))
        mesh = GrpcMesh(JOB, Topology(1, 0, members), service, Security(), timeouts, LIMITS, shared_memory=False)
        options = {**dict(channel_options(timeouts, LIMITS)), "grpc.max_send_message_length": -1}  # the puppet keeps to no limit
        channel = Security().channel(addresses[0], list(options.items()))
        stack.push_async_callback(channel.close)
        hello = Hello(JOB, epoch=1, source=1, target=0, incarnation="worker1", terms=terms_of(asdict(LIMITS)))
        starting = asyncio.ensure_future(ClusterBackend.start(mesh, Topology(1, 0, members), timeouts=timeouts, limits=LIMITS))
        stream = Stream(channel, hello)
        assert await stream.accepted()
        backend = await starting
        yield Theatre(backend, mesh, service, channel, hello, stream, heard)
        backend.abort()
        await backend.aclose()


async def _rank_0(stack: AsyncExitStack, timeouts: Timeouts, service: MeshService) -> str:
    endpoint = Endpoint("127.0.0.1:0", limits=LIMITS, timeouts=timeouts, snapshot=stats_pb2.SnapshotReply)
    endpoint.add_mesh(service)
    await endpoint.start()
    stack.push_async_callback(endpoint.aclose, 0)
    return endpoint.address


async def _puppet(stack: AsyncExitStack, timeouts: Timeouts, heard: "asyncio.Queue[Chunk]") -> str:
    """The puppet's receiving end: a plain gRPC server, as behind a proxy, that accepts every stream and records what comes."""
    server = grpc.aio.server(options=server_options(timeouts, LIMITS))

    async def listen(frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await context.send_initial_metadata((ACCEPTED,))
        async for frame in frames:
            heard.put_nowait(decode(frame))
        return mesh_pb2.PushResult().SerializeToString()

    push: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(listen)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("shardnet.v1.Mesh", {"Push": push})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return f"127.0.0.1:{port}"
