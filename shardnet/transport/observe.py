"""Questions to any process of a cluster, for people and tools that look at it from outside."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.errors import ProtocolError
from shardnet.pb import stats_pb2
from shardnet.transport import stats_service
from shardnet.transport.dialing import check_trust
from shardnet.transport.options import channel_options
from shardnet.transport.rpc_errors import translate

Reply = TypeVar("Reply")

ANSWER_S = 5.0  # a process that is alive answers in milliseconds; one in another site in less than a second


class Health(StrEnum):
    """What `grpc.health.v1` says about a process."""

    SERVING = "serving"
    NOT_SERVING = "not serving"  # it is starting or ending
    UNKNOWN = "unknown"


async def snapshot(address: str, *, timeout_s: float = ANSWER_S, security: Security | None = None) -> stats_pb2.SnapshotReply:
    """The statistics of the worker or rendezvous at `address`.

    Raises EndpointUnavailable when nobody answers, HandshakeError when one side does not trust the other, ProtocolError when
    somebody else answers.
    """
    method = f"/{stats_service.SERVICE}/{stats_service.SNAPSHOT}"
    request = stats_pb2.SnapshotRequest()
    return await ask(address, method, request, stats_pb2.SnapshotReply.FromString, timeout_s=timeout_s, security=security)


async def health(address: str, *, timeout_s: float = ANSWER_S, security: Security | None = None) -> Health:
    """The health of the process at `address`; raises like `snapshot`."""
    request = health_pb2.HealthCheckRequest()
    parse = health_pb2.HealthCheckResponse.FromString
    reply = await ask(address, "/grpc.health.v1.Health/Check", request, parse, timeout_s=timeout_s, security=security)
    match reply.status:
        case health_pb2.HealthCheckResponse.SERVING:
            return Health.SERVING
        case health_pb2.HealthCheckResponse.NOT_SERVING:
            return Health.NOT_SERVING
        case _:
            return Health.UNKNOWN


async def ask(
    address: str,
    method: str,
    request: Message,
    parse: Callable[[bytes], Reply],
    *,
    timeout_s: float,
    security: Security | None = None,
    to: Role | None = None,
) -> Reply:
    """Make one call over a connection of its own, to a process in the role `to` (None: any).

    Raises EndpointUnavailable, HandshakeError or ProtocolError.
    """
    security = security or Security()
    channel = security.channel(address, channel_options(Timeouts(), Limits()), to=to)
    async with _translated(channel, address, method, security, timeout_s, to):
        call = channel.unary_unary(method, request_serializer=_serialize, response_deserializer=bytes)
        return parse(await call(request, timeout=timeout_s))


@asynccontextmanager
async def _translated(
    channel: grpc.aio.Channel, address: str, method: str, security: Security, timeout_s: float, to: Role | None = None
) -> AsyncGenerator[None, None]:
    """Run a call over a channel, which is closed afterwards. Errors are raised as our own classes."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await check_trust(address, security, timeout_s, to)
        raise translate(error, address, method) from error
    except DecodeError as error:
        raise ProtocolError(f"{address} answered {method} with bytes that are not a valid reply") from error
    finally:
        await channel.close()


def _serialize(request: Message) -> bytes:
    return request.SerializeToString()
