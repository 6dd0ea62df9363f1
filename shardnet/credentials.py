"""Who may talk to whom: the one place that opens channels and ports, so that none is opened unprotected by oversight."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from shardnet.address import Address
from shardnet.errors import PlaintextRefused

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, int | str]]

_warned: set[str] = set()  # hosts for which the warning was logged; one line each a process is enough


@dataclass(frozen=True, slots=True)
class Security:
    """How the connections of one process are protected: plaintext, which stays on this machine unless `insecure`.

    insecure  allow plaintext to and from other machines: whoever reaches the port can read and alter the training
    """

    insecure: bool = False

    def check(self, address: str) -> None:
        """Whether a connection to `address` may be opened. Raises AddressError or PlaintextRefused."""
        check_plaintext(address, insecure=self.insecure)

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """A channel to `address`; connecting starts with the first call. The caller closes it."""
        check_plaintext(address, insecure=self.insecure)
        return grpc.aio.insecure_channel(Address.parse(address).target, options=options)

    def bind(self, server: grpc.aio.Server, address: str) -> int:
        """Open `server`'s port and return its number. Raises RuntimeError, without a reason, where gRPC cannot bind."""
        check_plaintext(address, insecure=self.insecure)
        return server.add_insecure_port(str(Address.parse(address)))


def check_plaintext(address: str, *, insecure: bool) -> None:
    """Allow plaintext on loopback; elsewhere only by explicit choice, which is logged once a host.

    Raises AddressError for an address that cannot be read, PlaintextRefused for one off this machine.
    """
    parsed = Address.parse(address)
    if parsed.is_loopback:
        return
    if not insecure:
        raise PlaintextRefused(
            f"{parsed} is no loopback address, and the connection would be neither encrypted nor authenticated; "
            "use a loopback address such as 127.0.0.1, or allow it with insecure=True (--insecure) on a network that you trust"
        )
    if parsed.host not in _warned:
        _warned.add(parsed.host)
        log.warning("plaintext connections on %s, as insecure=True allows: anyone on this network can read and alter them", parsed.host)
