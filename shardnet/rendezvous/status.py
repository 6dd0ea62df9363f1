"""A refusal on its way over gRPC and back: the one place that translates it."""

from typing import NoReturn

import grpc

from shardnet.errors import JoinRefused
from shardnet.rendezvous.refusal import Refusal
from shardnet.transport.handlers import Context, Reply

# The code is for people and tools that know gRPC; this metadata is for our client, which must not take gRPC's own
# INVALID_ARGUMENT or RESOURCE_EXHAUSTED for a refusal.
KEY = "shardnet-refusal"

CODES = {
    Refusal.MALFORMED: grpc.StatusCode.INVALID_ARGUMENT,
    Refusal.PROTOCOL: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.WISH: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.DUPLICATE_INCARNATION: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.DUPLICATE_ADDRESS: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.DUPLICATE_WORKER: grpc.StatusCode.ALREADY_EXISTS,
    Refusal.IDENTITY: grpc.StatusCode.PERMISSION_DENIED,
    Refusal.FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Refusal.ABSENT: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.RUNNING: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.ENDED: grpc.StatusCode.FAILED_PRECONDITION,
    Refusal.UNKNOWN: grpc.StatusCode.NOT_FOUND,
}


async def refuse(context: Context[Reply], refusal: JoinRefused) -> NoReturn:
    """End the call with the refusal."""
    await context.abort(CODES[Refusal(refusal.reason)], str(refusal), ((KEY, refusal.reason),))


def refusal_in(error: grpc.aio.AioRpcError) -> JoinRefused | None:
    """The refusal that ended a call, or None if something else did."""
    for key, value in error.trailing_metadata() or ():
        if key == KEY:
            return JoinRefused(error.details() or "refused", str(value))
    return None
