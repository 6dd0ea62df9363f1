"""`grpc.reflection.v1alpha`: tells tools without the .proto files which services this process has. Off by default; needs an extra."""

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing

import grpc
from google.protobuf.message import Message

from shardnet.errors import UsageError
from shardnet.transport.handlers import Context, exchange

SERVICE = "grpc.reflection.v1alpha.ServerReflection"


def reflection_handlers(services: Callable[[], Collection[str]]) -> grpc.GenericRpcHandler:
    """The service as gRPC handlers, which ask for `services` at each call. Raises UsageError if the library is not installed.

    The answers contain what the .proto files say; the port has checked before who may ask, as for every service.
    """
    try:
        from grpc_reflection.v1alpha import reflection, reflection_pb2
    except ImportError as error:
        raise UsageError(
            "server reflection needs the package grpcio-reflection: install shardnet[reflection], or leave it off "
            "(--reflection, SHARDNET_REFLECTION, connect(reflection=...))"
        ) from error

    async def answer(requests: AsyncGenerator[Message, None], context: Context[Message]) -> None:
        servicer = reflection.aio.ReflectionServicer(services())
        async with aclosing(servicer.ServerReflectionInfo(requests, context)) as replies:
            async for reply in replies:
                await context.write(reply)

    return grpc.method_handlers_generic_handler(SERVICE, {"ServerReflectionInfo": exchange(reflection_pb2.ServerReflectionRequest, answer)})
