"""`shardnet.v1.Stats`: what this process says of itself when asked."""

import asyncio
from collections.abc import Callable

import grpc

from shardnet.pb import stats_pb2
from shardnet.transport.handlers import Context, stream, unary

SERVICE = "shardnet.v1.Stats"
SNAPSHOT = "Snapshot"
WATCH = "Watch"
INTERVAL_S = 1.0  # between two snapshots of a stream, where the caller does not say
LEAST_S, MOST_S = 0.1, 60.0  # that a caller may ask for
MAX_WATCHERS = 16  # streams at once: a dashboard or two and some people; at their fastest they cost a tenth of a core

Snapshot = Callable[[], stats_pb2.SnapshotReply]  # called on the loop thread: must not block


class StatsService:
    """Snapshots, one or a stream of them; lives as long as its endpoint. Runs on one loop."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._watchers = 0
        self._closing = asyncio.Event()

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        """A snapshot that raises is logged by them, and an internal error to the caller."""
        methods = {SNAPSHOT: unary(stats_pb2.SnapshotRequest, self._answer), WATCH: stream(stats_pb2.WatchRequest, self._watch)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def close(self) -> None:
        """End all streams."""
        self._closing.set()

    async def _answer(self, _: stats_pb2.SnapshotRequest, __: Context[stats_pb2.SnapshotReply]) -> stats_pb2.SnapshotReply:
        return self._snapshot()

    async def _watch(self, request: stats_pb2.WatchRequest, context: Context[stats_pb2.SnapshotReply]) -> None:
        interval_s = request.interval_s if request.HasField("interval_s") else INTERVAL_S
        if not LEAST_S <= interval_s <= MOST_S:  # NaN neither
            why = f"interval_s must be {LEAST_S:g} to {MOST_S:g} seconds, got {interval_s:g}"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, why)
        if self._watchers == MAX_WATCHERS:
            why = f"this process has {MAX_WATCHERS} watchers, as many as it takes; end one, or ask for {SNAPSHOT} now and then"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._watchers += 1
        try:
            await self._tell(context, interval_s)
        finally:
            self._watchers -= 1

    async def _tell(self, context: Context[stats_pb2.SnapshotReply], interval_s: float) -> None:
        """Until the process closes, or the caller is gone. Who reads slowly gets fewer: none is made before the last one is taken."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while not self._closing.is_set():
            await context.write(self._snapshot())
            due_s = max(due_s + interval_s, loop.time())
            try:
                async with asyncio.timeout_at(due_s):
                    await self._closing.wait()
            except TimeoutError:
                continue
