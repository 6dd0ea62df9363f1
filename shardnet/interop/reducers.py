"""`keep_works`: keeps the works alive for which DDP's reducer waits in C++.

[Note: works of a reducer] With `join(divide_by_initial_world_size=False)` DDP gives its reducer the work of an all_reduce, and drops it.
The reducer holds the C++ half of the work alone. Python then frees the other half, with `PendingWork.wait` in it, and the reducer waits
for ever, on a condition of the C++ half that nobody signals.
"""

from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

_works = WeakKeyDictionary[Any, dist.Work]()  # by reducer: the last work that it was given, which takes the place of the one before


def keep_works() -> None:
    """Let reducers keep such a work whole from now on. Safe to call again."""
    give = c10d.Reducer._set_forward_pass_work_handle
    if getattr(give, "__wrapped__", None) is not None:
        return

    @wraps(give)
    def keep(self: Any, work: dist.Work, *rest: Any, **options: Any) -> Any:
        _works[self] = work
        return give(self, work, *rest, **options)

    c10d.Reducer._set_forward_pass_work_handle = keep  # type: ignore[method-assign]
