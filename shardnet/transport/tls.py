"""`TlsConnection`: a connection under mutual TLS, and the handshake that makes one.

OpenSSL works in memory here, and we send the records that it makes, many per system call: given the socket, OpenSSL would make
one call to write each 16 KiB, and two to read them. asyncio's own TLS copies everything twice more.
"""

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress

from shardnet.credentials import Identity
from shardnet.errors import CredentialsError, HandshakeError
from shardnet.transport.connection import Connection
from shardnet.wire import Buffer

FIRST_BYTE = b"\x16"  # of a connection that begins with TLS (RFC 8446, section 5.1: a handshake record)
NO_TLS = bytes((21, 3, 3, 0, 2, 2, 40))  # the answer of a process without TLS: a fatal alert, handshake_failure (section 6.2)

_RECORD_BYTES = 16 * 1024  # the most that one record holds
_BATCH_BYTES = 16 * _RECORD_BYTES  # encrypted at a time, and still in the cache when sent; a quarter or twice as much is as fast
_STAGE_BYTES = _BATCH_BYTES + 8 * 1024  # with the bytes that TLS adds


class TlsConnection(Connection):
    """The socket under TLS; made by `handshake`, which has verified the peer's certificate."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO) -> None:
        super().__init__(sock)
        self._tls = tls
        self._incoming = incoming  # encrypted, from the socket
        self._outgoing = outgoing  # encrypted, to the socket
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._waiting = memoryview(b"")  # encrypted; the system does not take it yet
        self._written_bytes = 0
        self._ended = False  # the peer sends nothing more
        self._problem: OSError | None = None  # an error that came after received bytes: the next `recv_into` raises it
        self._identity = Identity.of_peer(tls.getpeercert())

    @property
    def identity(self) -> Identity:
        return self._identity

    @property
    def is_tamper_proof(self) -> bool:
        return True

    @property
    def has_input(self) -> bool:
        return self._incoming.pending > 0 or self._tls.pending() > 0 or self._ended or self._problem is not None

    @property
    def written_bytes(self) -> int:
        return self._written_bytes

    @property
    def unacknowledged_bytes(self) -> int:
        return len(self._waiting) + super().unacknowledged_bytes

    def wake_at(self, count: int) -> None:
        here = self._incoming.pending + _RECORD_BYTES  # the most that OpenSSL may hold of an incomplete record
        super().wake_at(max(1, count - here))  # safe, because encrypted data is longer

    def recv_into(self, room: memoryview) -> int:
        if self._problem is not None:
            raise self._problem
        filled, want = 0, len(room)
        try:
            while filled < want and not self._ended:
                try:
                    while count := self._read(room[filled : filled + _RECORD_BYTES]):
                        filled += count
                    self._ended = filled < want  # the peer has said so
                except ssl.SSLWantReadError:
                    self._fetch()
        except (BlockingIOError, InterruptedError):
            if not filled:
                raise
        except OSError as error:
            self._problem = TlsBroken(error.errno, _explain(error)) if isinstance(error, ssl.SSLError) else error
            if not filled:
                raise self._problem from error
        return filled

    def sendmsg(self, buffers: Sequence[Buffer]) -> int:
        self.flush()
        taken = 0
        with _understood():
            for piece in _records(buffers):
                taken += self._tls.write(piece)
        self._put(self._outgoing.read())
        with suppress(BlockingIOError, InterruptedError):  # the bytes count as taken all the same
            self.flush()
        return taken

    def flush(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self.socket.send(self._waiting) :]

    async def receive(self, count: int) -> bytes:
        room = memoryview(bytearray(count))
        while not self._ended:
            try:
                with _understood():
                    filled = self._read(room)
                self._ended = not filled
                return bytes(room[:filled])
            except ssl.SSLWantReadError:
                self._store(await asyncio.get_running_loop().sock_recv(self.socket, _STAGE_BYTES))
        return b""

    async def send_all(self, data: bytes) -> None:
        with _understood():
            self._tls.write(data)
        self._put(self._outgoing.read())
        waiting, self._waiting = self._waiting, memoryview(b"")
        await asyncio.get_running_loop().sock_sendall(self.socket, waiting)

    def finish(self) -> None:
        with suppress(ssl.SSLError):  # OpenSSL wants to wait for the peer's close_notify; we do not
            self._tls.unwrap()
        with suppress(BlockingIOError, InterruptedError):  # a peer that does not read gets no close_notify
            self.flush()
            self._put(self._outgoing.read())
            self.flush()
        super().finish()

    def _read(self, room: memoryview) -> int:
        """Read as much of one record as fits into `room`; returns 0 if `room` is empty or the peer has ended. Raises SSLWantReadError."""
        count: int = self._tls.read(len(room), room) if room else 0  # type: ignore[assignment]  # bytes without a buffer only
        return count

    def _fetch(self) -> None:
        """Take encrypted bytes from the socket. Raises BlockingIOError."""
        self._store(self._stage[: self.socket.recv_into(self._stage)])

    def _store(self, data: bytes | memoryview) -> None:
        if data:
            self._incoming.write(data)
        else:
            self._ended = True

    def _put(self, data: bytes) -> None:
        self._written_bytes += len(data)
        self._waiting = memoryview(data)


async def handshake(
    sock: socket.socket,
    context: ssl.SSLContext,
    *,
    accepting: bool,
    said: bytes = b"",
    step: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
) -> TlsConnection:
    """Begin TLS on a connected, non-blocking socket; the caller bounds the time, and owns the socket until this returns.

    said  the bytes that were already read from the peer
    step  what surrounds each part of the handshake that takes the processor; it may wait

    Raises HandshakeError, whose text is about the peer ("its certificate has expired"), or OSError if the connection breaks.
    """
    loop, incoming, outgoing = asyncio.get_running_loop(), ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=accepting)
    incoming.write(said)
    while True:
        try:
            async with step():
                tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            await loop.sock_sendall(sock, outgoing.read())
            data = await loop.sock_recv(sock, _RECORD_BYTES)
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "closed in the middle of the TLS handshake") from None
            incoming.write(data)
        except ssl.SSLError as error:
            with suppress(OSError):
                await loop.sock_sendall(sock, outgoing.read())  # an alert that tells the peer why
            raise HandshakeError(_explain(error)) from error
    await loop.sock_sendall(sock, outgoing.read())
    try:
        return TlsConnection(sock, tls, incoming, outgoing)
    except CredentialsError as error:
        raise HandshakeError(str(error)) from error


class TlsBroken(OSError):
    """TLS ends the connection; `strerror` says why."""


@contextmanager
def _understood() -> Iterator[None]:
    """Raise OpenSSL's errors in words. The one that means "later" passes unchanged."""
    try:
        yield
    except ssl.SSLWantReadError:
        raise
    except ssl.SSLError as error:
        raise TlsBroken(error.errno, _explain(error)) from error


def _records(buffers: Sequence[Buffer]) -> Iterator[Buffer]:
    """The next batch, in pieces that each begin a record. Small buffers are joined, because a record of its own costs more
    than the copy."""
    left, small = _BATCH_BYTES, bytearray()
    for buffer in buffers:
        piece = memoryview(buffer)[:left]
        left -= len(piece)
        if len(piece) < _RECORD_BYTES:
            small += piece
        else:
            head = _RECORD_BYTES - len(small) % _RECORD_BYTES if small else 0
            if head:
                yield bytes(small + piece[:head])
                small.clear()
            if head < len(piece):
                yield piece[head:]
        if not left:
            break
    if small:
        yield bytes(small)


# OpenSSL's reasons, or those in the peer's alert, as words about the peer (RFC 8446, section 6).
_WORDS = {
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust the authority of this process's certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it requires a certificate of this process, which has sent none",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it considers this process's certificate expired; compare the clocks of both machines",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not accept this process's certificate, which may not be valid yet by its clock",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not accept this process's certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it does not accept this process's certificate",
    "TLSV1_ALERT_DECRYPT_ERROR": "it does not accept this process's certificate, which another authority of the same name has signed",
    "SSLV3_ALERT_HANDSHAKE_FAILURE": "it does not use TLS; give certificates or the join token to both processes, or to neither",
    "TLSV1_ALERT_PROTOCOL_VERSION": "it does not accept TLS 1.3",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it sent no certificate",
    "WRONG_VERSION_NUMBER": "it does not speak TLS",
    "HTTP_REQUEST": "it does not speak TLS",
    "UNSUPPORTED_PROTOCOL": "it does not support TLS 1.3",
    "NO_SHARED_CIPHER": "it does not support TLS 1.3",
}

# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED.
_BY_THE_CLOCK = {9: "is not valid yet", 10: "has expired"}


def _explain(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        if (wrong := _BY_THE_CLOCK.get(error.verify_code)) is not None:
            return f"its certificate {wrong} by this machine's clock; compare the clocks of both machines"
        return f"its certificate is not one of this cluster's: {error.verify_message}"
    return _WORDS.get(error.reason or "", f"TLS: {(error.reason or str(error)).lower().replace('_', ' ')}")
