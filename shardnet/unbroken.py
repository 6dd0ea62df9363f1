"""`unbroken`: what must not stop half-way, since other ranks take part in it and what it reads must not change meanwhile."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
GRACE_S = 0.25  # most is over sooner; and a program that is to end must not wait for a rank that does not come


async def unbroken(coroutine: Coroutine[Any, Any, T], what: str, abandon: Callable[[], None]) -> T:
    """Await a coroutine. A cancellation gives it `GRACE_S` to come to its end, and is raised then in place of what has come of it.

    If that is not enough, or there is a second cancellation, it is cancelled, and `abandon` is called: this rank has left what the others
    are in, and must not seem to go on with them. `what` it is says the log.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also where nobody waits for it any more
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait({task}, timeout=GRACE_S)
        finally:
            if not task.done():
                log.info("%s was cancelled, and had not come to its end %g s later: this rank has left its epoch", what, GRACE_S)
                task.cancel()
                abandon()
        raise
