"""Who may talk to whom: the one room that opens channels, so that none is opened unprotected by oversight.

    identity    who a certificate says that its holder is
    bundle      what one process proves itself with, and the TLS that follows from it
    security    how the connections of one process are protected
    secret      where a process finds its join token
    authority   makes certificates                              (needs `cryptography`, as do the next two)
    folder      certificates as files in a folder
    token       certificates from a secret that all share

[Note: trust] A cluster has an authority of its own, and nobody else's certificates count. Each certificate names one
identity, in a URI of ours: a worker of one job on one machine, a rendezvous, or an operator. Both ends of every
connection show theirs. The rendezvous lets a worker join only the job that its certificate names, and tells all members
who was placed where; a stream between two workers opens only where each is the one that was placed. Host names and
addresses count for nothing, as workers come and go on any.
"""

import shardnet.quiet  # noqa: F401 - before grpc
from shardnet.credentials.bundle import Credentials
from shardnet.credentials.identity import DOCTOR, Identity, Role
from shardnet.credentials.secret import find_token
from shardnet.credentials.security import Options, Security, check_plaintext

__all__ = ["DOCTOR", "Credentials", "Identity", "Options", "Role", "Security", "check_plaintext", "find_token"]
