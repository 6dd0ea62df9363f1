"""`Credentials`: the certificate and key of one process, and its TLS settings."""

import os
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import grpc

from shardnet.credentials.identity import Identity

# Names in certificates, by which grpcio knows what kind of process it has called: it compares nothing but host names.
ANYONE = "member.shardnet"
RENDEZVOUS = "rendezvous.shardnet"

_ALPN = "h2"  # gRPC's


@dataclass(frozen=True)
class Credentials:
    """A certificate, its key, and the certificate of the authority that both ends trust, all as PEM; see [Note: trust].

    Made by `load` (credentials/folder.py) or `from_token` (credentials/token.py), which check them.
    """

    identity: Identity
    authority: bytes
    certificate: bytes
    key: bytes

    def __repr__(self) -> str:
        return f"Credentials({self.identity})"  # no key in logs

    @cached_property
    def accepting(self) -> ssl.SSLContext:
        """TLS for the side that is called. Callers must show a certificate of the same authority."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.num_tickets = 0  # nobody resumes sessions; unread tickets would reset the connection of a caller that never reads
        return context

    @cached_property
    def calling(self) -> ssl.SSLContext:
        """TLS for the side that calls. The caller must check in the certificate which process it has reached."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # [Note: trust]
        return context

    def for_grpcio(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.set_alpn_protocols([_ALPN])
        context.load_verify_locations(cadata=self.authority.decode("ascii"))
        with _as_file(self.certificate + self.key) as path:
            context.load_cert_chain(path)
        return context


@contextmanager
def _as_file(content: bytes) -> Iterator[str]:
    """Put content into a file, because `ssl` reads keys only from files. On Linux it is in memory: nothing is left behind, however this
    ends."""
    if sys.platform == "linux":
        with os.fdopen(os.memfd_create("shardnet-key", os.MFD_CLOEXEC), "wb") as file:
            file.write(content)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as temporary:  # for its owner only
            temporary.write(content)
            temporary.flush()
            yield temporary.name
