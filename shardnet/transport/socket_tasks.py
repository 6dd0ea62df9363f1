"""`SocketTasks`: tasks that serve connections, each with its socket."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any


class SocketTasks:
    """The tasks of one listener; lives as long as the listener. Runs on one loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, None], sock: socket.socket) -> "asyncio.Task[None]":
        """Start a task with its socket, which is closed after the task even if the task is cancelled before it has begun."""
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
