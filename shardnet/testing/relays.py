"""`Relays`: one relay in front of each worker of a test's cluster, if its faults need that."""

from collections.abc import Callable
from typing import TypeVar

from shardnet.address import Address
from shardnet.loop import LoopThread
from shardnet.testing.conditions import Conditions
from shardnet.testing.harm import Harm, Kind
from shardnet.testing.relay import Relay

T = TypeVar("T")


class Relays:
    """By the numbers of workers; on the process's loop thread, for callers on any other one."""

    def __init__(self, count: int) -> None:
        self._loop = LoopThread.shared()
        self._relays = [self._open() for _ in range(count)]
        self._interrupted = [0] * count

    def settings(self, number: int) -> dict[str, str]:
        """The settings with which a worker must listen, so that its relay leads to it."""
        if number >= len(self._relays):
            return {}
        relay = self._relays[number]
        return {"listen": relay.target, "advertise": relay.address}

    def worsen(self, number: int, conditions: Conditions) -> None:
        self._do(lambda: setattr(self._relays[number], "conditions", conditions))

    def harm(self, number: int, kind: Kind, least_bytes: int) -> Harm:
        return self._do(lambda: self._relays[number].harm(kind, least_bytes=least_bytes))

    def interrupt(self, number: int, *, hold: bool) -> None:
        relay = self._relays[number]
        self._interrupted[number] += 1
        self._do(relay.hold if hold else relay.cut)

    def mend(self, number: int) -> None:
        """One interruption is over; the link is whole when all interruptions are."""
        self._interrupted[number] -= 1
        if not self._interrupted[number]:
            self._do(self._relays[number].mend)

    def close(self) -> None:
        for relay in self._relays:
            self._loop.run(relay.aclose()).result()

    def _do(self, act: Callable[[], T]) -> T:
        async def done() -> T:
            return act()

        return self._loop.run(done()).result()

    def _open(self) -> Relay:
        """Open a relay that leads to the same port of another loopback address: no other process takes that meanwhile."""

        async def opened() -> Relay:
            relay = Relay("127.0.0.1:0")
            await relay.__aenter__()
            relay.target = str(Address("127.0.0.2", Address.parse(relay.address).port))
            return relay

        return self._loop.run(opened()).result()
