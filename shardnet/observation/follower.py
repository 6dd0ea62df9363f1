"""`Follower`: the newest statistics of processes that are watched, at little cost to them."""

import asyncio
from collections.abc import Collection
from contextlib import aclosing, suppress
from types import TracebackType
from typing import Self

from shardnet.credentials import Security
from shardnet.errors import EndpointUnavailable, HandshakeError, ProtocolError
from shardnet.pb import stats_pb2
from shardnet.transport.observe import snapshot
from shardnet.transport.stats_service import LEAST_S, MOST_S
from shardnet.transport.watching import watch


class Follower:
    """One stream from each process that was ever asked for; an async context manager that lives as long as someone watches. On one loop.

    interval_s  from one snapshot to the next, within the limits of streams
    timeout_s   for a first answer; a process that is silent for this time beyond the interval counts as gone
    """

    def __init__(self, security: Security, interval_s: float, timeout_s: float) -> None:
        self._security = security
        self._interval_s = min(max(interval_s, LEAST_S), MOST_S)
        self._timeout_s = timeout_s
        self._streams: dict[str, _Stream] = {}

    async def ask(self, address: str) -> stats_pb2.SnapshotReply:
        """The last snapshot of the process at `address`.

        Raises EndpointUnavailable, HandshakeError or ProtocolError; after a failure the next call opens a new stream.
        """
        stream = self._streams.get(address)
        if stream is None:
            stream = self._streams[address] = _Stream(address, self._security, self._interval_s, self._timeout_s)
        try:
            return await stream.newest()
        except ProtocolError:  # for example: it has its maximum of watchers
            await self._forget(address)
            return await snapshot(address, timeout_s=self._timeout_s, security=self._security)
        except BaseException:
            await self._forget(address)
            raise

    async def keep(self, addresses: Collection[str]) -> None:
        """End the streams from all other processes: in days of watching many come and go."""
        await asyncio.gather(*(self._forget(address) for address in self._streams.keys() - set(addresses)))

    async def _forget(self, address: str) -> None:
        if (stream := self._streams.pop(address, None)) is not None:
            await stream.aclose()

    async def aclose(self) -> None:
        """End all streams."""
        await asyncio.gather(*map(self._forget, list(self._streams)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()


class _Stream:
    """One process's stream, and a task that reads it."""

    def __init__(self, address: str, security: Security, interval_s: float, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._reply: stats_pb2.SnapshotReply | None = None
        self._begun = asyncio.Event()
        self._task = asyncio.create_task(self._read(security, interval_s))
        self._task.add_done_callback(lambda _: self._begun.set())

    async def newest(self) -> stats_pb2.SnapshotReply:
        """Raises EndpointUnavailable, HandshakeError or ProtocolError once the stream has ended."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._begun.wait()
        except TimeoutError:
            raise EndpointUnavailable(f"{self._address} did not answer within {self._timeout_s:g} s") from None
        if self._task.done():
            self._task.result()
            raise EndpointUnavailable(f"{self._address} has closed the connection")
        assert self._reply is not None
        return self._reply

    async def _read(self, security: Security, interval_s: float) -> None:
        said = watch(self._address, interval_s=interval_s, timeout_s=self._timeout_s, security=security)
        async with aclosing(said):
            async for self._reply in said:
                self._begun.set()

    async def aclose(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError, EndpointUnavailable, HandshakeError, ProtocolError):
            await self._task
