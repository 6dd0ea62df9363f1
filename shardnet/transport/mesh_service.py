"""The server side of a mesh: accepts the streams of peers on a worker's one port."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.hello import ACCEPTED, Hello
from shardnet.wire import decode

if TYPE_CHECKING:
    from shardnet.transport.grpc_mesh import GrpcMesh

log = logging.getLogger(__name__)
_RESULT = mesh_pb2.PushResult().SerializeToString()


class MeshService:
    """Takes `shardnet.v1.Mesh` calls for whichever mesh the worker has now; lives as long as the endpoint."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s  # a peer may learn of the epoch, and call, before this worker does
        self.mesh: GrpcMesh | None = None
        self._changed = asyncio.Condition()

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        # No deserializer: a ProtocolError should end the stream with our words, not gRPC's.
        push: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_unary_rpc_method_handler(self._push)
        return grpc.method_handlers_generic_handler("shardnet.v1.Mesh", {"Push": push})

    async def attach(self, mesh: "GrpcMesh | None") -> None:
        """Give streams to this mesh from now on."""
        async with self._changed:
            self.mesh = mesh
            self._changed.notify_all()

    async def _push(self, frames: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        try:
            hello = Hello.read(context.invocation_metadata() or ())
        except ProtocolError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        mesh = await self._find(hello, context)
        if (refusal := mesh.refuse(hello)) is not None:
            log.warning("refused a stream from %s: %s", context.peer(), refusal)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        try:
            with mesh.connected(hello.source):  # before anything is awaited, or two streams could pass the check at once
                await context.send_initial_metadata((ACCEPTED,))
                async for frame in frames:
                    mesh.receive(hello.source, decode(frame))
        except ProtocolError as error:
            log.error("%s stream from rank %d ended: %s", mesh.where, hello.source, error)
            await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        return _RESULT

    async def _find(self, hello: Hello, context: grpc.aio.ServicerContext[bytes, bytes]) -> "GrpcMesh":
        """The mesh of the caller's epoch, which may be about to come."""
        try:
            async with asyncio.timeout(self._wait_s), self._changed:
                await self._changed.wait_for(lambda: self.mesh is not None and self.mesh.epoch >= hello.epoch)
        except TimeoutError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"this worker has not joined epoch {hello.epoch}")
        assert self.mesh is not None
        return self.mesh
