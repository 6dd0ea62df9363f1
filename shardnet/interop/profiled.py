"""What torch's profiler shows of a collective: a span from its call to its end, `shardnet:all_reduce`, as of gloo and NCCL. Where a thread
waits for it is a span of its own (`Pending.wait`)."""

from typing import Any

import torch
from torch.autograd import profiler

from shardnet.backend import Pending


def show(pending: Pending[Any]) -> None:
    """To the profiler that watches this thread, if any does."""
    if profiler._is_profiler_enabled:
        span = profiler.record_function(f"shardnet:{pending.op_name}")
        ended: torch.futures.Future[None] = torch.futures.Future()
        with span:
            span._call_end_callbacks_on_future(ended)
        pending.add_done_callback(lambda _: ended.set_result(None))
