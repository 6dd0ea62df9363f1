"""`host:port`, as people type it and as gRPC needs it."""

import ipaddress
from dataclasses import dataclass

from shardnet.errors import AddressError

MAX_HOST = 253  # characters of the longest DNS name (RFC 1035)
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address. `host` is an IPv4 or IPv6 literal (without brackets) or a DNS name; port 0 lets the system choose."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Read `10.0.0.1:7001`, `[::1]:7001` or `node-3:7001`; raises AddressError, which shows the right form.

        Two spellings of one literal or name become equal. The text is checked here and not by gRPC, which reads `unix:/tmp/x` as a
        socket, adds port 443 if none is given and takes port 80000 for 14464.
        """
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
            if not isinstance(_literal(host), ipaddress.IPv6Address):
                raise AddressError(f"{text!r} has no IPv6 address between its brackets; write [::1]:7001")
        elif ":" in host:
            raise AddressError(f"{text!r} is not host:port; write an IPv6 address in brackets, as in [::1]:7001")
        if not colon or not port.isascii() or not port.isdecimal() or int(port) > MAX_PORT:
            raise AddressError(f"{text!r} does not end in a port from 0 to {MAX_PORT}; write host:port, as in 10.0.0.1:7001")
        if not host or len(host) > MAX_HOST or any(c.isspace() or not c.isprintable() or c in "/%@,?#" for c in host):
            raise AddressError(f"{text!r} has no usable host name before its port; write host:port, as in 10.0.0.1:7001")
        return cls(str(_literal(host) or host.lower()), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The form that gRPC resolves; literals are recognised without a lookup."""
        return f"dns:///{self}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can have this address. Names other than localhost are not trusted: DNS may change."""
        literal = _literal(self.host)
        if isinstance(literal, ipaddress.IPv6Address) and literal.ipv4_mapped is not None:
            literal = literal.ipv4_mapped
        return literal.is_loopback if literal is not None else self.host.lower() == "localhost"

    @property
    def is_literal(self) -> bool:
        """Whether `host` is an IP address, which no DNS can lead elsewhere."""
        return _literal(self.host) is not None

    @property
    def is_unspecified(self) -> bool:
        """Whether it means "every interface" (0.0.0.0, [::]): good to listen on, but not an address that a peer can call."""
        literal = _literal(self.host)
        return literal is not None and literal.is_unspecified

    def with_port(self, port: int) -> "Address":
        return Address(self.host, port)


def _literal(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
