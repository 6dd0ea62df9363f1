"""The server side of a mesh: accepts the streams of peers on a worker's one port."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NoReturn

import grpc

from shardnet.config import Timeouts
from shardnet.credentials import Identity
from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.admission import caller
from shardnet.transport.direct import Caller, Refused
from shardnet.transport.hello import ACCEPTED, Hello
from shardnet.transport.http2 import Call, Headers, Status
from shardnet.transport.http2.headers import reply
from shardnet.transport.pulse import Pulse
from shardnet.transport.throttle import Throttle
from shardnet.wire import decode

if TYPE_CHECKING:
    from shardnet.transport.grpc_mesh import GrpcMesh

log = logging.getLogger(__name__)
_RESULT = mesh_pb2.PushResult().SerializeToString()


class MeshService:
    """Takes `shardnet.v1.Mesh` calls for whichever mesh the worker has now; lives as long as the endpoint.

    Calls of workers that connect directly come to `serve`, calls through a proxy come through grpcio to `handlers`.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._wait_s = timeouts.connect_s  # a peer may learn of the epoch, and call, before this worker does
        self._timeouts = timeouts
        self.mesh: GrpcMesh | None = None
        self._changed = asyncio.Condition()
        self._refused = Throttle(log)

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        # No deserializer: a ProtocolError should end the stream with our words, not gRPC's.
        push: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._push)
        attend: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(self._attend)
        return grpc.method_handlers_generic_handler("shardnet.v1.Mesh", {"Push": push, "Attend": attend})

    async def attach(self, mesh: "GrpcMesh | None") -> None:
        """Give streams to this mesh from now on."""
        async with self._changed:
            self.mesh = mesh
            self._changed.notify_all()

    # --- over our own HTTP/2

    async def serve(self, call: Call, peer: Caller) -> None:
        """Serve a peer's stream to its end; see `DirectCalls`."""
        async with Pulse(self._timeouts).beating(call):
            mesh, hello = await self._admit(peer.metadata, peer.address, peer.identity)
            with mesh.connected(hello.source, call):
                call.deliver(lambda message: mesh.receive(hello.source, decode(message, sealed=call.wants_checksums)))
                call.send_headers(reply((ACCEPTED,)))
                try:
                    await call.ended()
                except ProtocolError as error:
                    _break_off(mesh, hello.source, error)
            await call.send(_RESULT)
            call.send_status(Status(grpc.StatusCode.OK))

    # --- over grpcio

    async def _push(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            mesh, hello = await self._admit(context.invocation_metadata() or (), context.peer(), caller())
            with mesh.connected(hello.source):
                await context.send_initial_metadata((ACCEPTED,))
                try:
                    async for frame in frames:
                        mesh.receive(hello.source, decode(frame, sealed=caller() is None))
                except ProtocolError as error:
                    _break_off(mesh, hello.source, error)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.why)
        return _RESULT

    async def _attend(self, _: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        """Watch a peer at its request, until the mesh closes: see vigil.py. grpcio cancels this when it can no longer reach the peer."""
        try:
            mesh, hello = await self._admit(context.invocation_metadata() or (), context.peer(), caller(), attends=True)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.why)
        with mesh.attended(hello.source):
            await context.send_initial_metadata((ACCEPTED,))
            await mesh.closing.wait()

    # --- both

    async def _admit(
        self, metadata: "Headers | grpc.aio.Metadata | tuple[()]", address: str, identity: Identity | None, *, attends: bool = False
    ) -> "tuple[GrpcMesh, Hello]":
        """Check the caller, and find the mesh that it wants. Nothing is awaited after the check, or two streams could pass it at once."""
        try:
            hello = Hello.read(metadata)
        except ProtocolError as error:
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        mesh = await self._find(hello)
        if (refusal := mesh.refuse(hello, identity, attends=attends)) is not None:
            self._refused.warning("refused a stream from %s: %s", address, refusal)
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        return mesh, hello

    async def _find(self, hello: Hello) -> "GrpcMesh":
        """The mesh of the caller's epoch; waits if this worker has not joined that epoch yet."""
        try:
            async with asyncio.timeout(self._wait_s), self._changed:
                await self._changed.wait_for(lambda: self.mesh is not None and self.mesh.epoch >= hello.epoch)
        except TimeoutError:
            raise Refused(grpc.StatusCode.UNAVAILABLE, f"this worker has not joined epoch {hello.epoch}") from None
        assert self.mesh is not None
        return self.mesh


def _break_off(mesh: "GrpcMesh", source: int, error: ProtocolError) -> NoReturn:
    """End a stream on which something invalid came."""
    log.error("%s stream from rank %d ended: %s", mesh.where, source, error)
    mesh.lose(source, str(error))
    raise Refused(grpc.StatusCode.DATA_LOSS, str(error)) from error
