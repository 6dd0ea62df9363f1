"""`SocketTasks`: what serves connections, each with the socket that it serves."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any


class SocketTasks:
    """Tasks of one listener; lives as long as that. On one loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None], sock: socket.socket) -> "asyncio.Task[None]":
        """A task with its socket, which is closed behind it even if the task is cancelled before it has begun."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: sock.close())
        return task

    async def cancel(self) -> None:
        """End them all, and wait until they have."""
        for task in self._tasks:
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
