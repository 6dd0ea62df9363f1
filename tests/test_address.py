"""`host:port` as people type it."""

import pytest

from shardnet.address import Address
from shardnet.errors import AddressError, UsageError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7001", "10.0.0.1", 7001),
        ("node-3.example.org:1", "node-3.example.org", 1),
        ("Node_3:65535", "node_3", 65535),
        ("[::1]:7001", "::1", 7001),
        ("[0:0:0::1]:7001", "::1", 7001),
        ("localhost:0", "localhost", 0),
    ],
)
def test_good_addresses(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "host", "host:", ":7001", "host:port", "host:-1", "host:+1", "host: 1", "host:65536", "host:80000", "host:\u0661"),
        *(
            "::1:7001",
            "[::1]",
            "[]:7001",
            "[::g]:7001",
            "[10.0.0.1]:7001",
            "::1",
            "unix:/tmp/socket",
            "unix:/tmp/socket:1",
            "dns:///host:1",
        ),
        *("http://host:1", "a b:1", "a\n:1", "user@host:1", "a,b:1", f"{'x' * 254}:1"),
    ],
)
def test_bad_addresses_say_what_is_wanted(text: str) -> None:
    with pytest.raises(AddressError, match=r"write host:port|write an IPv6 address in brackets|write \[::1\]:7001") as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)
    assert isinstance(caught.value, UsageError)


@pytest.mark.parametrize("text", ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "localhost:1", "LOCALHOST:1", "[::ffff:127.0.0.1]:1"])
def test_loopback(text: str) -> None:
    assert Address.parse(text).is_loopback


@pytest.mark.parametrize(
    "text", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example.org:1", "127.1:1", "[::ffff:10.0.0.1]:1", "[fe80::1]:1"]
)
def test_not_loopback(text: str) -> None:
    assert not Address.parse(text).is_loopback


@pytest.mark.parametrize(("text", "unspecified"), [("0.0.0.0:1", True), ("[::]:1", True), ("127.0.0.1:1", False), ("host:1", False)])
def test_unspecified(text: str, unspecified: bool) -> None:
    assert Address.parse(text).is_unspecified is unspecified


def test_grpc_target_leaves_no_room_for_other_schemes() -> None:
    assert Address.parse("[::1]:7").target == "dns:///[::1]:7"
    assert Address.parse("host:7").with_port(8).target == "dns:///host:8"
