"""Connections to other processes, and the reason why one cannot be made."""

import asyncio
import errno
import os
import socket

from shardnet.address import Address
from shardnet.credentials import Role, Security
from shardnet.errors import HandshakeError
from shardnet.transport import tls
from shardnet.transport.connection import Connection, PlainConnection, tune
from shardnet.transport.http2 import frames

_ANSWER_BYTES = 4096
NOBODY = "a process without a certificate"  # in place of an identity, in words for a user


async def dial(address: Address, security: Security) -> Connection:
    """Make a connection, with TLS if `security` has credentials; the caller bounds the time.

    Raises HandshakeError if one end does not trust the other, otherwise OSError with the reason for the last address.
    """
    sock = await _connect(address)
    if security.credentials is None:
        return PlainConnection(sock)
    try:
        return await tls.handshake(sock, security.credentials.calling, accepting=False)
    except BaseException:
        sock.close()
        raise


async def dial_member(address: Address, security: Security, identity: str) -> Connection:
    """A connection to the member whom the rendezvous placed at `address`, and to nobody else; `identity` is what its certificate must say.

    Raises as `dial` does, and HandshakeError if another process answers.
    """
    connection = await dial(address, security)
    found = connection.identity
    if (found.uri if found else "") != identity:
        connection.close()
        raise HandshakeError(f"the process at {address} is {found or NOBODY}, but the member at this address must be {identity}")
    return connection


async def knock(address: Address, security: Security, identity: str) -> None:
    """Make sure that the member at `address` would take a call from this process; the caller bounds the time. Raises as `dial_member`
    does, and HandshakeError too if the member does not trust this process.

    A connection alone proves less: a proxy may take it for a member that nobody reaches.
    """
    connection = await dial_member(address, security, identity)
    try:
        await _greet(connection, None, must_answer=True)
    finally:
        connection.close()


async def check_trust(address: str, security: Security, timeout_s: float, to: Role | None = None) -> None:
    """Raise HandshakeError, saying why, if the process at `address`, which should have the role `to`, and this one would not
    trust each other. Used after a failed call, because grpcio does not tell this. Nothing happens if they would, or if nobody
    answers in time."""
    try:
        async with asyncio.timeout(timeout_s):
            connection = await dial(Address.parse(address), security)
            try:
                await _greet(connection, to)
            finally:
                connection.close()
    except HandshakeError as error:
        raise HandshakeError(f"{address} and this process do not trust each other: {error}") from error
    except OSError:  # a timeout, too
        return


async def _greet(connection: Connection, to: Role | None, *, must_answer: bool = False) -> None:
    """Begin as any gRPC client does, and see whether the server accepts that. Raises HandshakeError, and with `must_answer` OSError if
    it closes the connection and says nothing."""
    if connection.identity is not None and to not in (None, connection.identity.role):
        raise HandshakeError(f"its certificate is for {connection.identity}, not for a {to}")
    try:
        await connection.send_all(frames.PREFACE + frames.settings({}))
        answer = await connection.receive(_ANSWER_BYTES)
    except tls.TlsBroken as error:
        raise HandshakeError(error.strerror) from error
    if (why := frames.inadequate_security(answer)) is not None:
        raise HandshakeError(why)
    if must_answer and not answer:
        raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))


async def _connect(address: Address) -> socket.socket:
    """Connect a socket. Raises OSError with the reason for the last address."""
    loop = asyncio.get_running_loop()
    problem: OSError = OSError(f"the host name in {address} has no IP address")
    for family, kind, protocol, _, where in await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            tune(sock)
            await loop.sock_connect(sock, where)
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise problem
