"""`shardnet.v1.Stats`: what this process says of itself when asked."""

import logging
from collections.abc import Callable

import grpc

from shardnet.pb import stats_pb2

log = logging.getLogger(__name__)

SERVICE = "shardnet.v1.Stats"
SNAPSHOT = "Snapshot"

Snapshot = Callable[[], stats_pb2.SnapshotReply]  # called on the loop thread: must not block


def stats_handlers(snapshot: Snapshot) -> grpc.GenericRpcHandler:
    """The service as gRPC handlers. A snapshot that raises is logged here and is only "failed" to the caller."""

    async def answer(
        request: stats_pb2.SnapshotRequest,
        context: grpc.aio.ServicerContext[stats_pb2.SnapshotRequest, stats_pb2.SnapshotReply],
    ) -> stats_pb2.SnapshotReply:
        try:
            return snapshot()
        except Exception:
            log.exception("taking a statistics snapshot failed")
            await context.abort(grpc.StatusCode.INTERNAL, "taking the snapshot failed; see the log of this process")

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            SNAPSHOT: grpc.unary_unary_rpc_method_handler(
                answer,
                request_deserializer=stats_pb2.SnapshotRequest.FromString,
                response_serializer=stats_pb2.SnapshotReply.SerializeToString,
            )
        },
    )
