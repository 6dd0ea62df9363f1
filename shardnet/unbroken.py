"""`unbroken`: for coroutines that must not stop half-way, since other ranks take part and data that they read must not change meanwhile."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
GRACE_S = 0.25  # most coroutines end sooner; and a program that should end must not wait for a rank that does not come


async def unbroken(coroutine: Coroutine[Any, Any, T], what: str, abandon: Callable[[str], None]) -> T:
    """Await a coroutine. A cancellation gives it `GRACE_S` to reach its end, and is then raised in place of its result or error.

    If that is not enough, or there is a second cancellation, the coroutine is cancelled, and `abandon` is called with the reason: this rank
    has left what the others are doing, and must not seem to go on with them. `what` names the coroutine in the log and in the reason.
    """
    task = asyncio.ensure_future(coroutine)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the error as seen, even if nobody waits for it
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        try:
            await asyncio.wait({task}, timeout=GRACE_S)
        finally:
            if not task.done():
                log.info("%s was cancelled and did not end within %g s: this rank has left its epoch", what, GRACE_S)
                task.cancel()
                abandon(f"{what} was cancelled there")
        raise
