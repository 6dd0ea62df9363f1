"""`shardnet.v1.Stats`: what this process says of itself when asked."""

from collections.abc import Callable

import grpc
import psutil

from shardnet.pb import stats_pb2
from shardnet.transport.handlers import Context, unary

SERVICE = "shardnet.v1.Stats"
SNAPSHOT = "Snapshot"

Snapshot = Callable[[], stats_pb2.SnapshotReply]  # called on the loop thread: must not block


def stats_handlers(snapshot: Snapshot) -> grpc.GenericRpcHandler:
    """The service as gRPC handlers. A snapshot that raises is logged here, and an internal error to the caller."""

    async def answer(_: stats_pb2.SnapshotRequest, __: Context[stats_pb2.SnapshotReply]) -> stats_pb2.SnapshotReply:
        return snapshot()

    return grpc.method_handlers_generic_handler(SERVICE, {SNAPSHOT: unary(stats_pb2.SnapshotRequest, answer)})


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages included."""
    return int(psutil.Process().memory_info().rss)
