"""`Pipe`: reads the output of a child process on the event loop."""

import asyncio
import os
import time
from types import TracebackType
from typing import Self

READ_BYTES = 64 * 1024  # what a Linux pipe holds


class Pipe:
    """A pipe whose reading end belongs to the event loop and whose writing end goes to a child process.

    asyncio's own subprocess pipes are not used: with them `Process.wait()` may wait until every writer is gone, and a
    grandchild that keeps the pipe open then hides that the worker has died.

    Only a child that is given `write_fd` inherits it. Call `close_writer` after that, or the end is never read.
    """

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        self._reader = asyncio.StreamReader(limit=READ_BYTES)  # the child waits when twice this much is unread
        self._transport: asyncio.ReadTransport | None = None
        self._waiting_since_s: float | None = None
        self._waited_s = 0.0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        source = os.fdopen(self._read_fd, "rb", buffering=0)
        try:
            self._transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(self._reader), source)
        except BaseException:
            source.close()
            self.close_writer()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close_writer()
        if self._transport is not None:
            self._transport.close()

    async def read(self) -> bytes:
        """The next bytes, as many as are there; empty when every writer has closed."""
        self._waiting_since_s = time.monotonic()
        try:
            return await self._reader.read(READ_BYTES)
        finally:
            self._waited_s = self.waited_s
            self._waiting_since_s = None

    @property
    def waited_s(self) -> float:
        """How long `read` has waited for bytes in total; the time that the reader spends on them does not count."""
        return self._waited_s if self._waiting_since_s is None else self._waited_s + time.monotonic() - self._waiting_since_s

    async def readline(self) -> bytes:
        """The next line with its end; empty when every writer has closed. ValueError for one above 64 KiB."""
        return await self._reader.readline()

    def close_writer(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1
