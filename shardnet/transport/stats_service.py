"""`shardnet.v1.Stats`: the statistics that this process gives about itself when asked."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import grpc
from google.protobuf.message import DecodeError

from shardnet.config import Timeouts
from shardnet.pb import stats_pb2
from shardnet.transport.direct import Caller, Refused
from shardnet.transport.handlers import Context, stream, unary
from shardnet.transport.http2 import Call, CallBroken, Status
from shardnet.transport.http2.headers import reply
from shardnet.transport.options import HANDSHAKE_S, ONLOOKER_LOST_S
from shardnet.transport.pulse import Pulse

log = logging.getLogger(__name__)

SERVICE = "shardnet.v1.Stats"
SNAPSHOT = "Snapshot"
WATCH = "Watch"
PATH = f"/{SERVICE}/{WATCH}"
INTERVAL_S = 1.0  # between two snapshots of a stream, if the caller does not say
LEAST_S, MOST_S = 0.1, 60.0  # the intervals that a caller may ask for
MAX_WATCHERS = 16  # streams at once: a dashboard or two and some people; at their fastest they cost a tenth of a core
_ONLOOKERS = Timeouts(suspect_s=ONLOOKER_LOST_S, lost_s=ONLOOKER_LOST_S)

Snapshot = Callable[[], stats_pb2.SnapshotReply]  # called on the loop thread: must not block


class StatsService:
    """Serves one snapshot or a stream of them; lives as long as its endpoint. Runs on one loop.

    Our own tools take their streams over our own HTTP/2, which costs this process half as much; others come through grpcio. A caller that
    reads slowly gets fewer snapshots.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._watchers = 0
        self._calls: set[Call] = set()  # streams over our own HTTP/2
        self._closing = asyncio.Event()

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        """gRPC handlers. If a snapshot raises, they log it, and the caller gets an internal error."""
        methods = {SNAPSHOT: unary(stats_pb2.SnapshotRequest, self._answer), WATCH: stream(stats_pb2.WatchRequest, self._watch)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def close(self) -> None:
        """End all streams. Those over our own HTTP/2 end at once, because nobody waits for the tasks that serve them."""
        self._closing.set()
        for call in self._calls:
            with suppress(CallBroken):
                call.send_status(Status(grpc.StatusCode.OK))

    async def _answer(self, _: stats_pb2.SnapshotRequest, __: Context[stats_pb2.SnapshotReply]) -> stats_pb2.SnapshotReply:
        return self._snapshot()

    # --- a stream over our own HTTP/2

    async def serve(self, call: Call, _: Caller) -> None:
        """Serve a stream of snapshots, until the process closes or the caller is gone; see `DirectCalls`."""
        interval_s = _interval_s(await _request(call))
        if self._closing.is_set():
            raise Refused(grpc.StatusCode.UNAVAILABLE, "this process is closing")
        with self._watcher():
            call.send_headers(reply(()))
            self._calls.add(call)
            try:
                async with Pulse(_ONLOOKERS).beating(call):
                    await self._tell(call, interval_s)
            finally:
                self._calls.discard(call)

    async def _tell(self, call: Call, interval_s: float) -> None:
        loop = asyncio.get_running_loop()
        gone, closing = loop.create_task(call.broken()), loop.create_task(self._closing.wait())
        ends = {gone, closing}
        due_s = loop.time()
        try:
            while not (gone.done() or self._closing.is_set()):
                if not call.unsent_bytes:  # otherwise the caller reads too slowly
                    call.send_now(self._said())
                call.hear_out()
                due_s = max(due_s + interval_s, loop.time())
                await asyncio.wait(ends, timeout=due_s - loop.time(), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                gone.result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.wait(ends)

    def _said(self) -> bytes:
        try:
            return self._snapshot().SerializeToString()
        except Exception:
            log.exception("a snapshot failed")
            raise Refused(grpc.StatusCode.INTERNAL, "internal error; see the log of the process that was called") from None

    # --- a stream over grpcio

    async def _watch(self, request: stats_pb2.WatchRequest, context: Context[stats_pb2.SnapshotReply]) -> None:
        try:
            interval_s = _interval_s(request)
            with self._watcher():
                await self._write(context, interval_s)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.why)

    async def _write(self, context: Context[stats_pb2.SnapshotReply], interval_s: float) -> None:
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

    # --- both

    @contextmanager
    def _watcher(self) -> Iterator[None]:
        """Count one more watcher while the body runs. Raises Refused if there are too many."""
        if self._watchers == MAX_WATCHERS:
            why = (
                f"this process already has {MAX_WATCHERS} watchers, which is the maximum; end one, or call {SNAPSHOT} now and then instead"
            )
            raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._watchers += 1
        try:
            yield
        finally:
            self._watchers -= 1


async def _request(call: Call) -> stats_pb2.WatchRequest:
    async with asyncio.timeout(HANDSHAKE_S):
        said = await call.request()
    try:
        return stats_pb2.WatchRequest.FromString(said)
    except DecodeError:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "the request is not a valid WatchRequest message") from None


def _interval_s(request: stats_pb2.WatchRequest) -> float:
    interval_s = request.interval_s if request.HasField("interval_s") else INTERVAL_S
    if not LEAST_S <= interval_s <= MOST_S:  # false for NaN, too
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"interval_s must be {LEAST_S:g} to {MOST_S:g} seconds, got {interval_s:g}")
    return interval_s
