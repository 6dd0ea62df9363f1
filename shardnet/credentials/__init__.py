"""Decides which processes may talk to each other: the one package that opens channels, so that none is left unprotected by mistake.

    identity    the identity that a certificate gives its holder
    bundle      the certificate and key of one process, and its TLS settings
    security    how the connections of one process are protected
    secret      where a process finds its join token
    authority   makes certificates                              (needs `cryptography`, as do the next two)
    folder      certificates as files in a folder
    token       certificates from a secret that all processes share

[Note: trust] A cluster has an authority (CA) of its own, and certificates of others do not count. Each certificate names one
identity, in a URI of ours: a worker of one job on one machine, a rendezvous, or an operator. Both ends of every
connection show their certificates (mutual TLS). The rendezvous lets a worker join only the job that its certificate names, and tells
all members which identity has which rank and address. A stream between two workers opens only if each has the identity that the
rendezvous has told. Host names and addresses prove nothing, because workers come and go on any of them.
"""

import shardnet.quiet  # noqa: F401 - before grpc
from shardnet.credentials.bundle import Credentials
from shardnet.credentials.identity import DOCTOR, Identity, Role
from shardnet.credentials.secret import find_token
from shardnet.credentials.security import Options, Security, check_plaintext

__all__ = ["DOCTOR", "Credentials", "Identity", "Options", "Role", "Security", "check_plaintext", "find_token"]
