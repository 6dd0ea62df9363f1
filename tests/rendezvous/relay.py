"""A TCP relay that can cut its connections, or hang up on one side only."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """Relays connections to `target`. `cut` ends them as a load balancer does; `hang_up` closes the callers' side only: to the
    target the connections stay open, but silent."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._callers: list[socket.socket] = []
        self._gone: list[socket.socket] = []
        self._targets: list[socket.socket] = []
        self._pumps: list[asyncio.Task[None]] = []

    def cut(self) -> None:
        self.hang_up()
        for target in self._targets:
            target.shutdown(socket.SHUT_RDWR)
        self._gone += self._targets
        self._targets.clear()

    def hang_up(self) -> None:
        for caller in self._callers:
            caller.shutdown(socket.SHUT_RDWR)
            self._gone.append(caller)
        self._callers.clear()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                caller, _ = await loop.sock_accept(self._listener)
                target = socket.create_connection(self._target)
                target.setblocking(False)
                self._callers.append(caller)
                self._targets.append(target)
                self._pumps += [asyncio.create_task(_pump(caller, target)), asyncio.create_task(_pump(target, caller))]
        finally:
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)
            for open_socket in (self._listener, *self._callers, *self._gone, *self._targets):
                open_socket.close()


async def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Pass bytes on until either side is gone."""
    loop = asyncio.get_running_loop()
    while data := await loop.sock_recv(source, 65536):
        await loop.sock_sendall(sink, data)


@asynccontextmanager
async def relay(target: str) -> AsyncIterator[Relay]:
    running = Relay(target)
    task = asyncio.create_task(running.run())
    try:
        yield running
    finally:
        task.cancel()
        await asyncio.wait({task})
