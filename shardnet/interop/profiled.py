"""What torch's profiler shows of a collective: `shardnet:all_reduce` where it was called, and `shardnet: wait for all_reduce`
(`Pending.wait`) where a thread waited for it.

Not how long it was under way, as of gloo: such a span ends on another thread, and where the profiler has stopped by then it is written
into memory that is the profiler's no more.
"""

from typing import Any

from torch.autograd import profiler

from shardnet.backend import Pending


def show(pending: Pending[Any]) -> None:
    """To the profiler that watches this thread, if any does."""
    if profiler._is_profiler_enabled:
        with profiler.record_function(f"shardnet:{pending.op_name}"):
            pass
