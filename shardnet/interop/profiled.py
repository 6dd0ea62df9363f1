"""What torch's profiler shows of a collective: `shardnet:all_reduce` where it was called, and `shardnet: wait for all_reduce`
(`Pending.wait`) where a thread waited for it.

It does not show how long the collective ran, as it does for gloo: such a span ends on another thread, and if the profiler has stopped by
then, the span is written into memory that no longer belongs to the profiler.
"""

from typing import Any

from torch.autograd import profiler

from shardnet.backend import Pending


def show(pending: Pending[Any]) -> None:
    """Show a collective to the profiler that watches this thread, if there is one."""
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"shardnet:{pending.op_name}"):
            pass
