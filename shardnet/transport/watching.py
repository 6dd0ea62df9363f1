"""`watch`: a stream of a process's statistics over our own HTTP/2, which costs that process least."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import grpc
from google.protobuf.message import DecodeError

from shardnet.address import Address
from shardnet.config import KIB, Limits
from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable, HandshakeError, ProtocolError
from shardnet.pb import stats_pb2
from shardnet.transport.dialing import check_trust, dial
from shardnet.transport.http2 import Call, CallBroken, Status
from shardnet.transport.observe import ANSWER_S
from shardnet.transport.rpc_errors import translate_status
from shardnet.transport.stats_service import INTERVAL_S, PATH

# A snapshot of a world of 4096 ranks, as many as a rendezvous takes, has 360 KB. One that is larger is not read: a rendezvous with a page
# reads those of all workers on the loop on which its members' leases depend.
_LIMITS = Limits(chunk_bytes=64 * KIB, max_message_bytes=512 * KIB)


async def watch(
    address: str, *, interval_s: float = INTERVAL_S, timeout_s: float = ANSWER_S, security: Security | None = None
) -> AsyncGenerator[stats_pb2.SnapshotReply, None]:
    """The statistics of the worker or rendezvous at `address`, now and every `interval_s`, 0.1 to 60 s; ends when that process closes.
    A caller that reads too slowly gets only the newest ones.

    Raises EndpointUnavailable when nobody answers, when the process dies meanwhile, or when it says nothing for `timeout_s` longer than
    the interval; HandshakeError when one side does not trust the other, and ProtocolError when somebody else answers. A caller that
    leaves the loop early must close the generator (contextlib.aclosing); otherwise the call goes on until Python closes it.
    """
    async with _call(address, interval_s, timeout_s, security or Security()) as stream:
        while (said := await stream.next(interval_s + timeout_s)) is not None:
            yield stats_pb2.SnapshotReply.FromString(bytes(said))


class _Stream:
    """The caller's end of a stream; lives as long as the call, which it does not own. A task of its own waits for the stream's end."""

    def __init__(self, call: Call, address: str) -> None:
        self._address = address
        self._newest: memoryview | None = None
        self._news = asyncio.Event()
        self.has_begun = False  # something has come: both ends trust each other
        call.deliver(self._take)
        self._end = asyncio.get_running_loop().create_task(_status(call))
        self._end.add_done_callback(lambda _: self._news.set())

    async def next(self, silence_s: float) -> memoryview | None:
        """Wait for a new message, and return the newest; None after the last. Raises CallBroken, EndpointUnavailable or ProtocolError."""
        try:
            async with asyncio.timeout(silence_s):
                await self._news.wait()
        except TimeoutError:
            why = f"{self._address} sent nothing for {silence_s:g} s; the process may be frozen, or the network cut"
            raise EndpointUnavailable(why) from None
        self._news.clear()
        if self._newest is not None:
            newest, self._newest = self._newest, None
            if self._end.done():
                self._news.set()
            return newest
        try:
            status = self._end.result()
        except ProtocolError as error:
            raise ProtocolError(f"{self._address} answered {PATH} with bytes that are not a valid reply: {error}") from error
        if status.code is not grpc.StatusCode.OK:
            raise translate_status(status.code, status.details or status.code.name, self._address, PATH)
        return None

    def _take(self, message: memoryview) -> None:
        self._newest, self.has_begun = message, True
        self._news.set()

    async def aclose(self) -> None:
        self._end.cancel()
        await asyncio.wait({self._end})
        if not self._end.cancelled():
            self._end.exception()  # mark it as retrieved: the reader has seen the error, or does not want it


async def _status(call: Call) -> Status:
    """How the call ends."""
    block = await call.headers()
    if "grpc-status" not in dict(block):  # a refusal has it in its first header block
        block = await call.headers()
    return Status.read(block)


def _why(error: Exception) -> str:
    """The reason why a connection broke or could not be made; "" for a timeout."""
    if isinstance(error, ConnectionRefusedError):
        return "Connection refused"  # as grpcio says it; asyncio's text repeats the address
    return getattr(error, "strerror", None) or str(error)


@asynccontextmanager
async def _call(address: str, interval_s: float, timeout_s: float, security: Security) -> AsyncIterator[_Stream]:
    """Begin the call, and close it at the end. Errors are raised as our own classes."""
    call, stream = None, None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await dial(Address.parse(address), security)
        call = Call(connection, _LIMITS)
        stream = _Stream(call, address)
        call.open(address, PATH, ())
        call.send_now(stats_pb2.WatchRequest(interval_s=interval_s).SerializeToString())
        call.end()
        yield stream
    except HandshakeError as error:
        raise HandshakeError(f"{address} and this process do not trust each other: {error}") from error
    except EndpointUnavailable:  # its text already says what is wrong
        raise
    except (CallBroken, OSError) as error:  # a timeout, too
        if stream is not None and not stream.has_begun:
            await check_trust(address, security, timeout_s)
        why = _why(error) or f"no connection within {timeout_s:g} s"
        raise translate_status(grpc.StatusCode.UNAVAILABLE, why, address, PATH) from error
    except DecodeError as error:
        raise ProtocolError(f"{address} answered {PATH} with bytes that are not a valid reply") from error
    finally:
        if stream is not None:
            await stream.aclose()
        if call is not None:
            call.close()
