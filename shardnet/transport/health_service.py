"""`grpc.health.v1`: whether this process serves.

The library's servicer is not used, for three reasons: a watcher that does not read holds its lock, so that the status could not be
changed any more; only a coroutine can change the status; and it answers an invalid request with the class of a Python exception.
"""

import asyncio

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from shardnet.transport.handlers import Context, stream, unary

SERVICE = "grpc.health.v1.Health"
WHOLE = ""  # the name by which callers ask for the process as a whole


class HealthService:
    """One answer for the process and for each of its services by name; lives as long as its endpoint. Runs on one loop.

    The answer is NOT_SERVING until the owner says otherwise, and for good once this is closed.
    """

    def __init__(self) -> None:
        self.services: frozenset[str] = frozenset()  # the names of the services besides WHOLE; set before the first call
        self.is_serving = False
        self._closed = False
        self._changed = asyncio.Event()  # replaced by a new one at each change

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        methods = {"Check": unary(HealthCheckRequest, self._check), "Watch": stream(HealthCheckRequest, self._watch)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def set(self, serving: bool) -> None:
        """Set the answer from now on, and tell watchers. Ignored once this is closed."""
        if self._closed or serving == self.is_serving:
            return
        self.is_serving = serving
        self._wake()

    def close(self) -> None:
        """Tell the watchers that nothing is served any more, and end their calls."""
        self.is_serving, self._closed = False, True
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _knows(self, service: str) -> bool:
        return service == WHOLE or service in self.services

    def _status(self, service: str) -> HealthCheckResponse:
        if not self._knows(service):
            return HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if self.is_serving else HealthCheckResponse.NOT_SERVING)

    async def _check(self, request: HealthCheckRequest, context: Context[HealthCheckResponse]) -> HealthCheckResponse:
        if not self._knows(request.service):
            await context.abort(grpc.StatusCode.NOT_FOUND, "this process has no such service")
        return self._status(request.service)

    async def _watch(self, request: HealthCheckRequest, context: Context[HealthCheckResponse]) -> None:
        """Send the status now, and each change; a change that has not been written when the next one comes is left out."""
        told: HealthCheckResponse | None = None
        while True:
            changed, now, closed = self._changed, self._status(request.service), self._closed
            if now != told:
                await context.write(now)  # meanwhile the status may change, and this close: the next round tells it
                told = now
            if closed:
                return
            await changed.wait()
