"""Ending a task that one owns."""

import asyncio


async def end_task(task: "asyncio.Task[None]") -> None:
    """Cancel a task and wait for its end; raises the task's error, unless that is its own cancellation.

    `await task` under `suppress(CancelledError)` would swallow the cancellation of the caller, too.
    """
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
