"""gRPC's errors as ours: the one place that translates the errors of a call to another process."""

import grpc

from shardnet.errors import EndpointUnavailable, ProtocolError, ShardnetError
from shardnet.printable import printable

UNREACHABLE = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving ")  # grpcio's words


def translate(error: grpc.aio.AioRpcError, address: str, what: str) -> ShardnetError:
    """The error to raise for a failed call of `what` at `address`."""
    return translate_status(error.code(), reason(error), address, what)


def translate_status(code: grpc.StatusCode, reason: str, address: str, what: str) -> ShardnetError:
    """The same, for a call that ended with this status."""
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return EndpointUnavailable(f"{address} did not answer {what} in time; the process may be frozen or the network slow")
        case code if code in UNREACHABLE and "http1" in reason:  # grpcio's words
            return ProtocolError(
                f"{address} speaks HTTP/1 and not gRPC; it may be the process's port for a page or for metrics; give its gRPC port"
            )
        case code if code in UNREACHABLE:
            return EndpointUnavailable(f"{address} is not available: {reason}; check the address and that the process runs")
        case grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolError(
                f"the server at {address} does not know {what}: it is not a shardnet process, or one in another role (worker or rendezvous)"
            )
        case code:
            return ProtocolError(f"{address} answered {what} with {code.name}: {reason}")


def reason(error: grpc.aio.AioRpcError) -> str:
    """gRPC's own words in one line. If no connection could be made, only the last part of the chain says why."""
    words = printable(" ".join((error.details() or error.code().name).split()))
    return words.rpartition(": ")[2].rstrip("]") if words.startswith(_NO_CONNECTION) else words
