"""`Security`: how the connections of one process are protected."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import grpc

from shardnet.address import Address
from shardnet.credentials.bundle import ANYONE, RENDEZVOUS, Credentials
from shardnet.credentials.identity import Role
from shardnet.errors import CredentialsError, PlaintextRefused

log = logging.getLogger(__name__)

Options = Sequence[tuple[str, int | str]]

_warned: set[str] = set()  # hosts for which the warning was logged; one line per host and process is enough


@dataclass(frozen=True, slots=True)
class Security:
    """Mutual TLS if there are credentials; otherwise plaintext, which stays on this machine unless `insecure`.

    insecure     allow plaintext to and from other machines: whoever reaches the port can read and alter the training
    credentials  of this process; with them every connection is encrypted, even on loopback
    """

    insecure: bool = False
    credentials: Credentials | None = None

    @classmethod
    def find(cls, role: Role, *, insecure: bool = False, certs: str = "", token: str = "") -> Self:
        """Make it from what a user gives: a folder of certificates, a join token, or neither.

        Raises CredentialsError if what is given cannot be used, or if more than one is given.
        """
        if insecure + bool(certs) + bool(token) > 1:
            raise CredentialsError(
                "more than one is given of a folder of certificates (--certs, SHARDNET_CERTS), a join token (SHARDNET_TOKEN), and "
                "unencrypted connections (--insecure, SHARDNET_INSECURE); choose one"
            )
        # Imported here, because the modules for certificates cost 0.1 s of start-up, which plaintext does not need.
        if certs:
            from shardnet.credentials.folder import load

            return cls(credentials=load(certs))
        if token:
            from shardnet.credentials.token import from_token

            return cls(credentials=from_token(token, role))
        return cls(insecure=insecure)

    def __str__(self) -> str:
        """In words, for users."""
        return "plaintext" if self.credentials is None else "mutual TLS"

    def check(self, address: str) -> None:
        """Check that connections to or at `address` may be opened. Raises AddressError or PlaintextRefused."""
        if self.credentials is None:
            check_plaintext(address, insecure=self.insecure)
        else:
            Address.parse(address)

    def channel(self, address: str, options: Options, *, to: Role | None = None) -> grpc.aio.Channel:
        """A channel to `address`, where a process in the role `to` must answer (None: any role); connecting starts with the
        first call. The caller closes it."""
        self.check(address)
        target = Address.parse(address).target
        if self.credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        name = RENDEZVOUS if to is Role.RENDEZVOUS else ANYONE
        return grpc.aio.secure_channel(target, self.credentials.for_grpcio(), options=[*options, ("grpc.ssl_target_name_override", name)])


def check_plaintext(address: str, *, insecure: bool) -> None:
    """Allow plaintext on loopback; elsewhere only by explicit choice, which is logged once per host.

    Raises AddressError for an address that cannot be read, PlaintextRefused for one that is not on this machine.
    """
    parsed = Address.parse(address)
    if parsed.is_loopback:
        return
    if not insecure:
        raise PlaintextRefused(
            f"{parsed} is not a loopback address, and the connection would be neither encrypted nor authenticated; give all processes "
            "certificates (--certs, made by `shardnet certs`) or a join token (SHARDNET_TOKEN, from `shardnet certs token`), use a "
            "loopback address such as 127.0.0.1"
        )
    if parsed.host not in _warned:
        _warned.add(parsed.host)
        log.warning("plaintext connections on %s, as insecure=True allows: anyone on this network can read and alter them", parsed.host)
