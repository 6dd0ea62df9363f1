"""The outgoing half of a link: one stream to one peer, with one writer."""

import asyncio
from collections import deque
from collections.abc import Callable

import grpc

from shardnet.errors import PeerLost
from shardnet.transport.hello import ACCEPTED
from shardnet.wire import Chunk, encode

PUSH = "/shardnet.v1.Mesh/Push"


class Outbox:
    """Frames on their way to one peer; lives as long as the mesh.

    Two writes under way on one grpc.aio call raise, and a cancelled write cancels the call; so collectives only put
    frames into this queue, and one task of the mesh's own writes them.
    """

    def __init__(self, peer: int, channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], window_bytes: int) -> None:
        self.peer = peer
        self.accepted = False
        self._channel = channel
        # None for the serializers: frames are bytes already (shardnet/wire.py)
        push: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(PUSH)
        self._call = push(metadata=metadata, wait_for_ready=True)
        self._window_bytes = window_bytes  # what may wait here; with it a slow link holds up its senders, not the memory
        self._frames: deque[bytes] = deque()
        self._queued_bytes = 0
        self._finishing = False
        self._failure: str | None = None
        self._wake_writer = asyncio.Event()
        self._room = asyncio.Event()

    async def put(self, chunk: Chunk) -> None:
        """Queue a chunk; its buffer is free when this returns. One with data waits while the window is full; one without is
        small, and why this rank aborts must be queued before it has closed."""
        while len(chunk.data) and self._queued_bytes >= self._window_bytes and self._failure is None:
            self._room.clear()
            await self._room.wait()
        if self._failure is not None or self._finishing:
            raise PeerLost(f"rank {self.peer} lost: {self._failure or 'this rank is closing'}", self.peer)
        frame = encode(chunk)
        self._frames.append(frame)
        self._queued_bytes += len(frame)
        self._wake_writer.set()

    async def run(self, on_accepted: Callable[[], None]) -> str | None:
        """Write until the outbox is finished or the stream breaks; returns why it broke, None if it did not."""
        try:
            # A refusal brings metadata, too, and its status only later.
            self.accepted = ACCEPTED in tuple(await self._call.initial_metadata() or ())
            on_accepted()
            while frame := await self._next():
                await self._call.write(frame)
                self._queued_bytes -= len(frame)
                self._room.set()
            await self._call.done_writing()
            await self._call
        except grpc.aio.AioRpcError as error:
            return reason(error.code(), error.details())
        except asyncio.InvalidStateError:  # write to a call that has ended
            return reason(await self._call.code(), await self._call.details())
        return None

    async def broken(self) -> str | None:
        """Wait until the call ends; returns why if it was not by our own finishing."""
        code = await self._call.code()
        return None if code is grpc.StatusCode.OK else reason(code, await self._call.details())

    def fail(self, why: str) -> None:
        """Refuse what comes, drop what waits."""
        self._failure = self._failure or why
        self._frames.clear()
        self._room.set()
        self._wake_writer.set()
        self._call.cancel()

    def finish(self) -> None:
        """Write what is queued, then end the stream."""
        self._finishing = True
        self._wake_writer.set()

    async def flush(self, timeout_s: float) -> None:
        """Finish, and wait until the peer has taken everything, the stream breaks, or the time is over."""
        self.finish()
        if self.accepted:
            await asyncio.wait([asyncio.ensure_future(self._call.code())], timeout=timeout_s)

    async def aclose(self) -> None:
        self.fail("this rank has closed")
        await self._channel.close()

    async def _next(self) -> bytes | None:
        while not self._frames:
            if self._finishing or self._failure is not None:
                return None
            self._wake_writer.clear()
            await self._wake_writer.wait()
        return self._frames.popleft()


def reason(code: grpc.StatusCode, details: str | None) -> str:
    """Why a stream ended, in words for a user."""
    text = details or ""
    if "keepalive" in text.lower() or "ping timeout" in text.lower():
        return "silent: it did not answer pings (frozen, or the network is cut)"
    match code:
        case grpc.StatusCode.UNAVAILABLE:
            return f"its connection broke ({text})"
        case grpc.StatusCode.CANCELLED:
            return "it closed the stream"
        case _:
            return f"{code.name.lower().replace('_', ' ')}: {text}"
