"""A join token: certificates without files, from a secret that all processes of a cluster share.

The authority's key is derived from the secret, so each process makes its own certificate, and only holders of the secret can.
It is a shortcut: whoever has the secret may be any worker of any job, and the only way to revoke it is a new one for all.
"""

import hashlib
import re
import secrets

from shardnet.credentials.authority import AUTHORITY_DAYS, Authority
from shardnet.credentials.bundle import Credentials
from shardnet.credentials.identity import ANONYMOUS, Identity, Role
from shardnet.errors import CredentialsError

_PREFIX = "shardnet-"
_BYTES = 32
_FORM = re.compile(_PREFIX + r"[\w-]{43}", re.ASCII)
_DAYS = AUTHORITY_DAYS - 1.0  # its authority was made a moment before


def new_token() -> str:
    """A new secret, for all processes of a cluster; `shardnet certs token` prints one."""
    return _PREFIX + secrets.token_urlsafe(_BYTES)


def from_token(token: str, role: Role) -> Credentials:
    """Credentials with a name that no other process has. Raises CredentialsError for a token that `new_token` did not make: a
    guessable token would be guessed, because whoever calls a port sees the authority's public key and can test guesses."""
    if not _FORM.fullmatch(token):
        raise CredentialsError(
            "the join token was not made by `shardnet certs token`; give all processes the same token, made by this command"
        )
    secret = token.removeprefix(_PREFIX)
    number = int.from_bytes(hashlib.sha512(b"shardnet authority, version 1: " + secret.encode()).digest())
    return Authority.of_secret(number).issue(Identity(role, ANONYMOUS + secrets.token_hex(8)), days=_DAYS)
