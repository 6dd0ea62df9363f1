"""`Relay`: stands in front of a port, and data that goes through it comes late, slowly, in pieces, broken, twice, or not at all.

    async with Relay("127.0.0.1:7001") as relay:     # callers that should be disturbed call relay.address
        relay.conditions = Conditions(latency_s=0.05, bytes_per_s=12.5e6)
        relay.harm(Kind.FLIP)                         # one bit of what passes next
        relay.hold()                                  # nothing passes, and nobody is told ...
        relay.mend()                                  # ... until now
        relay.cut()                                   # all connections end by a reset, and new ones, too

A worker stands behind one if it joins with `connect(listen="host:port", advertise=relay.address)`.
"""

import asyncio
import random
import socket
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from shardnet.address import Address
from shardnet.errors import StateError
from shardnet.testing.conditions import BOTH, Conditions, Way
from shardnet.testing.fault_not_fired import FaultNotFired
from shardnet.testing.harm import Harm, Kind
from shardnet.testing.lane import Lane
from shardnet.testing.pipe import Pipe

_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends a reset


class Relay:
    """A listener and the connections through it, on the loop that enters it; its methods are for that loop's thread.

    target  host:port to which it leads; may be set later. While nobody listens there, callers are reset, as by a machine that is up
    listen  where it listens itself; port 0: the system chooses
    seed    for the jitter and for the bits that flip

    Leaving without an error raises FaultNotFired for a harm that was ordered but never done: a test that disturbs nothing proves nothing.
    """

    def __init__(self, target: str, *, listen: str = "127.0.0.1:0", seed: int = 0) -> None:
        self.target = target
        self._listen = Address.parse(listen)
        rng = random.Random(seed)
        self._random = rng
        self._lanes = {way: Lane(way, rng) for way in Way}
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_cut = False
        self._address = ""

    # --- what others see

    @property
    def address(self) -> str:
        """host:port to call instead of the target."""
        if not self._address:
            raise StateError("a relay has no address until it is entered; use async with Relay(...) as relay")
        return self._address

    @property
    def connections(self) -> int:
        """How many connections go through it now."""
        return len(self._connections)

    def passed_bytes(self, way: Way) -> int:
        """How many bytes have come out at the other end so far."""
        return self._lanes[way].passed_bytes

    # --- what can be done to the link

    @property
    def conditions(self) -> Conditions:
        """The properties of the link from now on, in both directions."""
        return self._lanes[Way.IN].conditions

    @conditions.setter
    def conditions(self, conditions: Conditions) -> None:
        for lane in self._lanes.values():
            lane.conditions = conditions

    def harm(self, kind: Kind, *, way: Way = Way.IN, least_bytes: int = 1) -> Harm:
        """Damage the next block of at least `least_bytes`; several orders damage one block each."""
        harm = Harm(kind, way, least_bytes, rng=self._random)
        self._lanes[way].harms.append(harm)
        return harm

    def hold(self, ways: Iterable[Way] = BOTH) -> None:
        """Let nothing pass until `mend`; nothing is lost. To each end it seems that the other one has frozen."""
        for way in ways:
            self._lanes[way].hold()

    def cut(self) -> None:
        """Reset all connections now, and until `mend` also new ones."""
        self._is_cut = True
        for connection in tuple(self._connections):
            connection.reset()

    def mend(self) -> None:
        """Take back `hold` and `cut`. Connections that were cut stay cut."""
        self._is_cut = False
        for lane in self._lanes.values():
            lane.let_go()

    def check_fired(self) -> None:
        """Raise FaultNotFired for harms that were ordered but not done yet."""
        missing = [str(harm) for harm in self._harms() if not harm.fired]
        if missing:
            raise FaultNotFired(f"the relay to {self.target} was told to {missing[0]}, but no such block passed" + _and_more(missing))

    def _harms(self) -> Iterable[Harm]:
        return (harm for lane in self._lanes.values() for harm in lane.harms)

    # --- beginning and end

    async def __aenter__(self) -> Self:
        if self._server is not None:
            raise StateError("a relay can be entered only once; make another one")
        self._server = await asyncio.start_server(self._serve, self._listen.host, self._listen.port)
        host, port = self._server.sockets[0].getsockname()[:2]
        self._address = str(Address(host, port))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()
        if error is None:
            self.check_fired()

    async def aclose(self) -> None:
        """Reset what is still connected and stop listening. Safe to call twice."""
        assert self._server is not None, "the relay is not entered"
        self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection = _Connection([(reader, writer)])
        self._connections.add(connection)
        try:
            await self._carry(connection)
        except* (OSError, asyncio.CancelledError):
            connection.reset()
        finally:
            self._connections.discard(connection)
            self._tasks.discard(task)
            await connection.close()

    async def _carry(self, connection: "_Connection") -> None:
        if self._is_cut:
            raise ConnectionResetError
        for lane in self._lanes.values():
            await lane.passable()  # a caller through a held link waits, too
        target = Address.parse(self.target)
        connection.ends.append(await asyncio.open_connection(target.host, target.port))
        (from_caller, to_caller), (from_target, to_target) = connection.ends
        for writer in (to_caller, to_target):
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # otherwise slices would be joined again
        async with asyncio.TaskGroup() as group:
            group.create_task(Pipe(self._lanes[Way.IN], from_caller, to_target).carry())
            group.create_task(Pipe(self._lanes[Way.OUT], from_target, to_caller).carry())


class _Connection:
    """Both ends of a connection through a relay; the caller's first."""

    def __init__(self, ends: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
        self.ends = ends

    def reset(self) -> None:
        for _, writer in self.ends:
            with suppress(OSError, ValueError):  # it is closed; uvloop says the latter
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()

    async def close(self) -> None:
        for _, writer in self.ends:
            writer.close()
        for _, writer in self.ends:
            with suppress(OSError):
                await writer.wait_closed()


def _and_more(missing: Sequence[str]) -> str:
    return f" ({len(missing) - 1} more harms were not done either)" if len(missing) > 1 else ""
