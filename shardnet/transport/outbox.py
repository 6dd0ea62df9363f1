"""The outgoing half of a link: one stream to one peer."""

import asyncio
import os
import random
from collections.abc import Callable

import grpc

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Security
from shardnet.errors import HandshakeError, PeerLost, ProtocolError
from shardnet.topology import Member
from shardnet.transport.dialing import dial_member
from shardnet.transport.hello import ACCEPTED, Hello
from shardnet.transport.http2 import Call, CallBroken, Status
from shardnet.transport.options import HANDSHAKE_S
from shardnet.transport.pulse import Pulse
from shardnet.wire import Chunk, encode

PUSH = "/shardnet.v1.Mesh/Push"
_RETRY_S = 0.1  # the first pause before another try, if a peer's port does not answer yet; later a second
_MAX_RETRY_S = 1.0


class Outbox:
    """Frames on their way to one peer; lives as long as the mesh.

    `accepted` turns true when the peer has taken the stream. Cancelling a `put` does not harm the stream: what has
    begun goes out whole.
    """

    def __init__(self, peer: Member, hello: Hello, security: Security, timeouts: Timeouts, limits: Limits) -> None:
        self.peer = peer.rank
        self.accepted = False
        self.problem = ""  # of the last try to connect
        security.check(peer.address)
        self._address = Address.parse(peer.address)
        self._identity = peer.identity
        self._security = security
        self._hello = hello
        self._limits = limits
        self._pulse = Pulse(timeouts)
        self._call: Call | None = None
        self._finishing = False
        self._failure: str | None = None
        self._over = asyncio.Event()  # the stream has ended

    async def put(self, chunk: Chunk) -> None:
        """Send a chunk; its buffer is free when this returns."""
        call = self._open()
        try:
            await call.send(*encode(chunk, sealed=call.wants_checksums))
        except CallBroken as error:
            raise self._lost(str(error)) from error

    def put_now(self, chunk: Chunk) -> None:
        """Send a small chunk without waiting, however much is queued already: for chunks whose number the sender bounds in another way."""
        call = self._open()
        try:
            call.send_now(*encode(chunk, sealed=call.wants_checksums))
        except CallBroken as error:
            raise self._lost(str(error)) from error

    def _open(self) -> Call:
        """The call. Raises PeerLost once nothing can be sent on it any more."""
        if self._failure is not None or self._finishing or self._call is None:
            raise self._lost()
        return self._call

    async def run(self, on_accepted: Callable[[], None]) -> str | None:
        """Open the stream, and run until it ends; returns why it broke, None if it was finished. May be cancelled."""
        try:
            call = await self._connect()
            while True:
                try:
                    return await self._watch(call, on_accepted)
                except CallBroken as error:
                    if self.accepted or self._failure is not None:
                        raise
                    self.problem = str(error)  # a port with many callers cuts some off: [Note: strangers] in strangers.py
                finally:
                    call.close()
                await asyncio.sleep(random.uniform(_RETRY_S, _MAX_RETRY_S))
                call = await self._connect(again=True)
        except (CallBroken, HandshakeError, ProtocolError) as error:
            return self._failure or str(error)
        finally:
            self._over.set()

    @property
    def call(self) -> Call | None:
        """The call that carries the stream; None until there is a connection."""
        return self._call

    @property
    def outgoing_bytes(self) -> int:
        """How many bytes were put that the peer's system does not have yet."""
        return 0 if self._call is None else self._call.outgoing_bytes

    @property
    def is_silent(self) -> bool:
        """The peer does not answer pings."""
        return self._pulse.is_silent

    def suspect(self) -> None:
        """Somebody else takes the peer for dead: believe it sooner."""
        self._pulse.suspect()

    def trust(self) -> None:
        """Nobody takes the peer for dead any more."""
        self._pulse.trust()

    def fail(self, why: str) -> None:
        """Refuse further chunks, drop those that wait, close."""
        self._failure = self._failure or why
        if self._call is not None:
            self._call.close(self._failure)

    def finish(self) -> None:
        """End the stream after the chunks that were put."""
        if not self._finishing and self._call is not None:
            self._call.end()
        self._finishing = True

    async def flush(self, timeout_s: float) -> None:
        """Finish, and wait until the peer has taken everything, the stream breaks, or the time is over."""
        self.finish()
        if self.accepted:
            await asyncio.wait([asyncio.ensure_future(self._over.wait())], timeout=timeout_s)

    def _lost(self, why: str = "this rank is closing") -> PeerLost:
        return PeerLost(f"rank {self.peer} lost: {self._failure or why}", self.peer)

    async def _connect(self, *, again: bool = False) -> Call:
        """Connect to the peer; try until it works. `again`: the peer was there, so raise CallBroken if nothing answers any more.

        Raises CallBroken too once the peer was given up.
        """
        pause_s = _RETRY_S
        while True:
            self._check_wanted()
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    connection = await dial_member(self._address, self._security, self._identity)
            except HandshakeError:
                raise  # the next try would end like this one
            except OSError as error:  # a timeout, too
                self.problem = os.strerror(error.errno) if error.errno else "nothing answers there"
                if again:
                    raise CallBroken(f"its connection broke ({self.problem})") from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
            else:
                self._call = Call(connection, self._limits)
                self._check_wanted()
                self._call.open(str(self._address), PUSH, self._hello.metadata())
                return self._call

    def _check_wanted(self) -> None:
        """Raise CallBroken if the peer was given up meanwhile; close the call that was opened since."""
        if self._failure is not None:
            if self._call is not None:
                self._call.close(self._failure)
            raise CallBroken(self._failure)

    async def _watch(self, call: Call, on_accepted: Callable[[], None]) -> str | None:
        async with self._pulse.beating(call):
            block = await call.headers()
            self.accepted = ACCEPTED in block  # a refusal also consists of headers, with the status in them
            if self.accepted:
                on_accepted()
                block = await call.headers()
            return reason(Status.read(block))


def reason(status: Status) -> str | None:
    """Why a stream ended, in words for a user; None if it was finished."""
    match status.code:
        case grpc.StatusCode.OK:
            return None
        case grpc.StatusCode.UNAVAILABLE:
            return f"its connection broke ({status.details})"
        case grpc.StatusCode.CANCELLED:
            return "it closed the stream"
        case code:
            return f"{code.name.lower().replace('_', ' ')}: {status.details}"
