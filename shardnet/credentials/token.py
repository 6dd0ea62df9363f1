"""A join token: certificates without files, from a secret that all processes of a cluster share.

The authority's key follows from the secret, so each process makes its own certificate, and only who has the secret can.
It is for the impatient: whoever has it may be any worker of any job, and it can be revoked by no less than a new one.
"""

import hashlib
import secrets

from shardnet.credentials.authority import AUTHORITY_DAYS, Authority
from shardnet.credentials.bundle import Credentials
from shardnet.credentials.identity import Identity, Role
from shardnet.errors import CredentialsError

_PREFIX = "shardnet-"
_BYTES = 32


def new_token() -> str:
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def from_token(token: str, role: Role) -> Credentials:
    """Credentials of a name that nobody else has. Raises CredentialsError for a token that `new_token` did not make: one
    that can be guessed would be, as whoever calls a port sees the authority's public key."""
    secret = token.removeprefix(_PREFIX)
    if not token.startswith(_PREFIX) or len(secret) < len(secrets.token_urlsafe(_BYTES)) or not secret.isascii():
        raise CredentialsError("the join token is not one that `shardnet certs token` has made; give all processes one that it prints")
    number = int.from_bytes(hashlib.sha512(b"shardnet authority, version 1: " + secret.encode()).digest())
    return Authority.of_secret(number).issue(Identity(role, secrets.token_hex(8)), days=AUTHORITY_DAYS)
