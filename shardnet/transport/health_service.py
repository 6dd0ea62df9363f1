"""`grpc.health.v1`: whether this process serves, by the library's servicer."""

import grpc
from grpc_health.v1 import health, health_pb2

from shardnet.transport.handlers import Context, stream, unary

SERVICE = "grpc.health.v1.Health"


def health_handlers(servicer: health.aio.HealthServicer) -> grpc.GenericRpcHandler:
    """The service as gRPC handlers. The library's own would answer a request that is none with the class of a Python exception, and log
    a traceback."""

    async def watch(request: health_pb2.HealthCheckRequest, context: Context[health_pb2.HealthCheckResponse]) -> None:
        await servicer.Watch(request, context)

    ask = health_pb2.HealthCheckRequest
    return grpc.method_handlers_generic_handler(SERVICE, {"Check": unary(ask, servicer.Check), "Watch": stream(ask, watch)})
