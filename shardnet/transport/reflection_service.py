"""`grpc.reflection.v1alpha`: which services this process has, for tools that know no .proto files. A switch, and an extra."""

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import aclosing

import grpc
from google.protobuf.message import Message

from shardnet.errors import UsageError
from shardnet.transport.handlers import Context, exchange

SERVICE = "grpc.reflection.v1alpha.ServerReflection"


def reflection_handlers(services: Callable[[], Collection[str]]) -> grpc.GenericRpcHandler:
    """The service as gRPC handlers; `services` are asked for at the first call. Raises UsageError where the library is not installed.

    What is told is what the .proto files say; who may ask is settled before, as for every service.
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
