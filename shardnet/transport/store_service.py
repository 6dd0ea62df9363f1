"""`shardnet.v1.Store`: keys and values that the workers of one world share. Rank 0 keeps them; the others ask it by `StoreClient`.

They are few and small: data that workers must exchange before another library connects them, such as NCCL's ids.
"""

import asyncio
from collections.abc import Sequence
from typing import NoReturn, TypeVar

import grpc

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Role, Security
from shardnet.errors import ClosedError, HandshakeError, UsageError
from shardnet.pb.store_pb2 import StoreReply, StoreRequest
from shardnet.topology import Member
from shardnet.transport.admission import caller
from shardnet.transport.dialing import check_trust, dial_member
from shardnet.transport.direct import Refused
from shardnet.transport.handlers import Context, unary
from shardnet.transport.options import HANDSHAKE_S, channel_options
from shardnet.transport.rpc_errors import reason, translate

SERVICE = "shardnet.v1.Store"
PATH = f"/{SERVICE}/Ask"
MAX_BYTES = 64 * 1024 * 1024  # of keys and values: far above what a world needs; keeps an endless caller from filling the memory
ANSWER_S = 5.0  # in addition to the time that a caller lets the store wait
_LONGEST_S = 1e7  # the longest wait that a caller may ask for, four months: event loops cannot count further than some years
_ENTRY_BYTES = 128  # that an entry takes in addition to its key and value
Value = TypeVar("Value")


class StoreService:
    """The keys and values of one world; lives as long as the endpoint of its rank 0. Runs on one loop. Other ranks also have a
    `StoreService`, but never open it."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._epoch: int | None = None  # None: this rank is not rank 0, or does not know yet
        self._closed = False
        self._changed = asyncio.Event()  # replaced by a new one at each change

    @property
    def handlers(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(SERVICE, {"Ask": unary(StoreRequest, self._serve)})

    def open(self, epoch: int) -> None:
        """Answer the workers of this epoch's world from now on: this is its rank 0."""
        self._epoch = epoch
        self._wake()

    def close(self) -> None:
        """Refuse callers that wait for a key, and callers that come later."""
        self._closed = True
        self._wake()

    async def ask(self, request: StoreRequest) -> StoreReply:
        """Rank 0's own counterpart of `StoreClient.ask`. Raises UsageError if the request is refused, ClosedError once this is closed."""
        try:
            return await self._answer(request)
        except Refused as refusal:
            raise (ClosedError if self._closed else UsageError)(refusal.why) from None

    async def _serve(self, request: StoreRequest, context: Context[StoreReply]) -> StoreReply:
        try:
            identity = caller()
            if identity is not None and not identity.may_join(self._job):
                raise Refused(grpc.StatusCode.PERMISSION_DENIED, f"{identity} is not a worker of job {self._job!r}")
            return await self._answer(request)
        except Refused as refusal:
            await context.abort(refusal.code, refusal.why)

    async def _answer(self, request: StoreRequest) -> StoreReply:
        within_s = request.within_s
        if not 0 <= within_s <= _LONGEST_S:  # false for NaN, too
            _refuse(f"within_s must be 0 to {_LONGEST_S:g} seconds, got {within_s:g}")
        await self._expect(request.epoch)
        match request.WhichOneof("what"):
            case "set":
                for key, value in _pairs(request.set):
                    self._set(key, value)
            case "append":
                for key, value in _pairs(request.append):
                    self._set(key, self._values.get(key, b"") + value)
            case "get":
                missing = await self._missing(request.get.keys, within_s)
                return StoreReply(missing=missing, values=() if missing else [self._values[key] for key in request.get.keys])
            case "wait":
                return StoreReply(missing=await self._missing(request.wait.keys, within_s))
            case "check":
                return StoreReply(number=int(all(key in self._values for key in request.check.keys)))
            case "delete":
                return StoreReply(number=sum(self._delete(key) for key in request.delete.keys))
            case "add":
                return StoreReply(number=self._add(request.add.key, request.add.amount))
            case "exchange":
                return StoreReply(values=[self._exchange(request.exchange)])
            case "count":
                return StoreReply(number=len(self._values))
            case _:
                _refuse("the request names no operation")
        return StoreReply()

    async def _expect(self, epoch: int) -> None:
        """Wait until this rank knows its place in a world: others may know it before this one does. Raises Refused for callers of another
        epoch."""
        if self._epoch is None and not self._closed:
            await self._opened()
        self._check_open()
        if epoch != self._epoch:
            _refuse(f"this is the store of epoch {self._epoch}, the caller is of epoch {epoch}")

    def _check_open(self) -> None:
        if self._closed:
            raise Refused(grpc.StatusCode.UNAVAILABLE, "the worker that keeps the store of this world is closing")

    async def _opened(self) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                while self._epoch is None and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            _refuse("this worker does not keep the store: it is not rank 0, or does not know its rank yet")

    async def _missing(self, keys: Sequence[str], within_s: float) -> list[str]:
        """Wait for the keys; returns those that have not come within this time."""
        missing: list[str] = []
        try:
            async with asyncio.timeout(within_s):
                while missing := [key for key in keys if key not in self._values]:
                    await self._changed.wait()
                    self._check_open()
        except TimeoutError:
            pass
        return missing

    def _set(self, key: str, value: bytes) -> None:
        grown = self._bytes - self._size(key) + _ENTRY_BYTES + len(key) + len(value)
        if grown > MAX_BYTES:
            raise Refused(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"the store of this world is full: it keeps at most {MAX_BYTES} bytes; delete some keys"
            )
        self._bytes = grown
        self._values[key] = value
        self._wake()

    def _delete(self, key: str) -> bool:
        self._bytes -= self._size(key)
        return self._values.pop(key, None) is not None

    def _size(self, key: str) -> int:
        value = self._values.get(key)
        return 0 if value is None else _ENTRY_BYTES + len(key) + len(value)

    def _add(self, key: str, amount: int) -> int:
        value = self._values.get(key, b"0")
        try:
            total = int(value) + amount
        except ValueError:
            _refuse(f"the value of {key!r} is not a number: {value[:40]!r}")
        self._set(key, str(total).encode())
        return total

    def _exchange(self, exchange: StoreRequest.Exchange) -> bytes:
        value = self._values.get(exchange.key)
        if value is None and exchange.expected:
            return exchange.expected
        if value is None or value == exchange.expected:
            self._set(exchange.key, exchange.desired)
            return exchange.desired
        return value

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class StoreClient:
    """Asks the rank that keeps the store of a world. Runs on one loop."""

    def __init__(self, keeper: Member, security: Security, timeouts: Timeouts, limits: Limits) -> None:
        """Opens nothing yet."""
        self._keeper = keeper
        self._security = security
        self._channel = security.channel(keeper.address, channel_options(timeouts, limits), to=Role.WORKER)
        self._call = self._channel.unary_unary(
            PATH, request_serializer=StoreRequest.SerializeToString, response_deserializer=StoreReply.FromString
        )
        self._checked = False  # the keeper is the one whom the rendezvous placed there

    async def ask(self, request: StoreRequest) -> StoreReply:
        """Raises UsageError for what the store refuses, EndpointUnavailable, HandshakeError or ProtocolError."""
        await self._check()
        try:
            reply: StoreReply = await self._call(request, timeout=request.within_s + ANSWER_S)
            return reply
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
                raise UsageError(reason(error)) from None
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                await check_trust(self._keeper.address, self._security, HANDSHAKE_S, Role.WORKER)
            raise translate(error, self._keeper.address, "a request to the store of this world") from error

    async def _check(self) -> None:
        """Before the first question: grpcio takes the certificate of any worker, of any job. Who does not answer here is left to grpcio."""
        if self._checked or self._security.credentials is None:
            return
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                connection = await dial_member(Address.parse(self._keeper.address), self._security, self._keeper.identity)
        except HandshakeError:
            raise
        except OSError:  # a timeout, too
            return
        connection.close()
        self._checked = True

    async def aclose(self) -> None:
        await self._channel.close()


def _pairs(entries: StoreRequest.Entries) -> list[tuple[str, bytes]]:
    if len(entries.keys) != len(entries.values):
        _refuse(f"each key must have one value, got {len(entries.keys)} keys and {len(entries.values)} values")
    return list(zip(entries.keys, entries.values, strict=True))


def _refuse(why: str) -> NoReturn:
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, why)
