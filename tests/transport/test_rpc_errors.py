"""What gRPC says of a failed call, in our words."""

import grpc
import pytest

from shardnet.transport.rpc_errors import reason


@pytest.mark.parametrize(
    ("details", "words"),
    [
        ("a\nb   c", "a b c"),
        ("failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused", "Connection refused"),
        (
            "errors resolving a.b:1: [field:hostname lookup error:address lookup failed for a.b:1: Domain name not found]",
            "Domain name not found",
        ),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        (None, "UNAVAILABLE"),
    ],
)
def test_it_is_one_line_that_can_be_printed(details: str | None, words: str) -> None:
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)
    assert reason(error) == words
