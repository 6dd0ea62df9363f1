"""`unbroken`: what must not stop half-way, since other ranks take part in it and what it reads must not change meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unbroken(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine to its end. A cancellation waits for that, and is raised then in place of what has come of it; a second one cancels
    the coroutine."""
    task = asyncio.ensure_future(coroutine)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen
        raise
