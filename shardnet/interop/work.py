"""`PendingWork`: torch's handle of a running collective.

[Note: futures] A caller that asks for a `torch.futures.Future`, as DDP does for each bucket, may add callbacks to it that compute and wait.
They must not run on shardnet's loop thread, so each world has threads of its own that complete futures (ends.py). A caller that only
waits causes no such thread.

Setting an exception on a future crashes DDP's reducer, and a future that is made from a failed work reports success. So the
future that is given out is that of a callback that raises (`then`).

For results on a GPU everything here is in stream order, as with NCCL: `wait` makes the current stream wait, and a future that knows
the device makes the stream of whoever waits for it wait.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist

from shardnet.backend import Pending
from shardnet.backend.streams import Event, is_on_gpu, join, now
from shardnet.interop.ends import Ends
from shardnet.uncompiled import uncompiled

_AT_ONCE_S = 1e-6  # the shortest time that there is: zero means no limit

Tensor = torch.Tensor
Finish = Callable[[Any], None]  # puts a result where the caller wants it


@dataclass(frozen=True, slots=True)
class Facts:
    """What a program may ask a work for, other than its result."""

    sequence: int = 0  # how many collectives the rank has called in that group
    timeout: timedelta = timedelta(0)  # of the work
    source: int | None = None  # of a receive: the rank of the group that sends, if the caller has named it


@uncompiled
class PendingWork(dist.Work):
    """Lives as long as torch, or whoever asked for it, holds it. Any thread.

    outputs  the tensors that hold the result once it is done
    finish   called once with the pending result, before anybody sees it or hears that it is there; None: the result is in place already
    """

    def __init__(
        self, pending: Pending[Any], outputs: Sequence[Tensor], ends: Ends, finish: Finish | None = None, facts: Facts | None = None
    ) -> None:
        super().__init__()
        self._pending = pending.quietly()  # torch lets go of works that nobody waits for
        self._outputs = list(outputs)
        self._finish = finish
        self._ends = ends  # see [Note: futures]
        self._facts = facts or Facts()
        self._lock = Lock()
        self._finished: list[tuple[torch.device, Event]] = []  # GPUs on which `finish` has put results, maybe on another stream, and when
        self._failed: Exception | None = None  # what `finish` has raised
        self._futures: dict[Executor, torch.futures.Future[list[Tensor]]] = {}  # by the thread that completes it
        self._was_waited_for = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until it is done. Raises the collective's error, or TimeoutError after `timeout` (0: none); the collective then goes on.

        If the caller has asked for its future before, that is done, too: it completes after the callbacks of earlier futures.
        """
        self._settle(timeout.total_seconds() if timeout > timedelta(0) else None)
        self._was_waited_for = True
        if self._futures and (future := self._futures.get(self._ends.for_caller())) is not None:
            future.wait()  # a caller that has waited for the work may ask for the future's value at once
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        """The host waits, too: data from a network cannot be ordered in a stream before it has arrived."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is over. A caller that polls this until it is true need not wait: the result is in place."""
        if not self._pending.done():
            return False
        if self._pending.exception() is None:
            with suppress(Exception):  # `wait` and `exception` report the error
                self._settle(None)
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        return (self._pending.exception() or self._failed) if self._pending.done() else None

    @property
    def timeout(self) -> timedelta:
        return self._facts.timeout

    def source_rank(self) -> int:
        """The rank of the group from which a receive gets its tensor."""
        return super()._source_rank() if self._facts.source is None else self._facts.source  # torch's own error

    def _source_rank(self) -> int:
        return self.source_rank()

    def _get_sequence_number(self) -> int:
        return self._facts.sequence

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        """The future. A callback of another future may wait for it, if the callback itself has asked for it."""
        thread = self._ends.for_caller()
        with self._lock:
            if thread in self._futures:
                return self._futures[thread]
            devices = {tensor.device for tensor in self._outputs if tensor.is_cuda}
            done: torch.futures.Future[None] = torch.futures.Future(devices=list(devices))
            future = self._futures[thread] = done.then(lambda _: self._result())
        if self._was_waited_for:
            done.set_result(None)
        else:
            self._pending.add_done_callback(partial(_end, thread, done))  # at once, if that is done
        return future

    def _result(self) -> list[Tensor]:
        self._settle(None)
        return self._outputs

    def _settle(self, timeout_s: float | None) -> None:
        """Wait, and put the result where the caller wants it, if it is not there yet."""
        result = self._pending.wait(timeout_s)
        with self._lock:
            if self._finish is not None:
                self._put(self._finish, result)
            elif self._failed is not None:
                raise self._failed
            else:
                for device, event in self._finished:
                    join(event, device)

    def _put(self, finish: Finish, result: Any) -> None:
        try:
            finish(result)
        except Exception as error:
            self._failed = error
            raise
        finally:
            self._finish = None
        self._finished = [(device, now(device)) for device in {tensor.device for tensor in self._outputs if is_on_gpu(tensor)}]


def _end(thread: Executor, done: "torch.futures.Future[None]", _: Pending[Any]) -> None:
    try:
        thread.submit(done.set_result, None)
    except RuntimeError:  # the world is closed, and so are its threads: without this a waiter would wait for ever
        done.set_result(None)


@uncompiled
class AnySourceWork(PendingWork):
    """A receive whose result is the group rank of the sender."""

    def source_rank(self) -> int:
        return int(self._pending.wait())


@uncompiled
class Works(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[PendingWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all, even if one fails; raises the first error. `timeout` is for all together; zero: each one's own."""
        until_s = time.monotonic() + timeout.total_seconds()
        errors = []
        for work in self._works:
            try:
                work.wait(timedelta(seconds=max(until_s - time.monotonic(), _AT_ONCE_S)) if timeout > timedelta(0) else timeout)
            except Exception as error:  # noqa: BLE001 - it is raised below, when all have ended
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        for work in self._works:
            work.block_current_stream()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        """The first error of those that are done."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        all_done = torch.futures.collect_all([work.get_future() for work in self._works])
        return all_done.then(lambda done: [tensor for each in done.value() for tensor in each.value()])
