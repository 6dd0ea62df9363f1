"""`ReplicaAverages`: the second half of a reduction where several ranks hold the same shard."""

import concurrent.futures
import threading
from collections import deque
from dataclasses import dataclass

import torch

from shardnet.backend import Pending, ReduceOp
from shardnet.fsdp.communicators import Communicators

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class _Average:
    first: Pending[Tensor]  # gives this rank's shard of the node's mean
    label: str
    result: "concurrent.futures.Future[Tensor]"


class ReplicaAverages:
    """Averages reduced shards over replicas, each as soon as its node's half is done, while other units are at theirs.

    In the order in which they were asked for, which is the same on all ranks, whatever the order in which halves end.
    """

    def __init__(self, comms: Communicators) -> None:
        self._comms = comms
        self._waiting: deque[_Average] = deque()
        self._lock = threading.Lock()  # halves end on the loop thread, or at once on the caller's

    def follow(self, first: Pending[Tensor], label: str) -> Pending[Tensor]:
        """A handle for the mean over replicas of what `first` gives."""
        average = _Average(first, label, concurrent.futures.Future())
        with self._lock:
            self._waiting.append(average)
        first.add_done_callback(lambda _: self._advance())
        return Pending(average.result, f"average of {label}")

    def _advance(self) -> None:
        with self._lock:
            while self._waiting and self._waiting[0].first.done():
                self._start(self._waiting.popleft())

    def _start(self, average: _Average) -> None:
        error = average.first.exception()
        if error is not None:
            self._refuse(average, error)
            return
        shard = average.first.wait()
        try:
            second = self._comms.averages.all_reduce(shard, ReduceOp.MEAN, out=shard, label=average.label)
        except BaseException as failure:  # noqa: BLE001 - whatever it is belongs to the awaiter
            average.result.set_exception(failure)
            return
        second.add_done_callback(lambda done: _pass_on(done, average.result))

    def _refuse(self, average: _Average, error: BaseException) -> None:
        """The node's half failed: the replicas, whose half may not have, must not wait, and the numbers stay in step.

        What this rank takes part with is something that nobody else takes it for, so it fails for everyone.
        """
        average.result.set_exception(error)
        try:
            refusal = self._comms.averages.all_reduce(torch.zeros(1), label=f"{average.label}, whose reduction within a node failed")
        except Exception:  # noqa: BLE001 - the backend is closed, and the replicas know
            return
        refusal.add_done_callback(_forget)


def _forget(done: Pending[Tensor]) -> None:
    done.exception()  # seen, so that dropping the handle is no warning


def _pass_on(done: Pending[Tensor], result: "concurrent.futures.Future[Tensor]") -> None:
    error = done.exception()
    if error is None:
        result.set_result(done.wait())
    else:
        result.set_exception(error)
