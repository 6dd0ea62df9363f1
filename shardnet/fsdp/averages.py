"""`ReplicaAverages`: the second half of a reduction where several ranks hold the same shard."""

import concurrent.futures
import threading
from collections import deque
from dataclasses import dataclass, field

import torch

from shardnet.backend import Pending, ReduceOp
from shardnet.backend.streams import Stream, new_stream, using
from shardnet.fsdp.communicators import Communicators

Tensor = torch.Tensor


@dataclass(slots=True)
class _Average:
    first: Pending[Tensor]  # gives this rank's shard of the node's mean
    label: str
    stream: Stream | None  # on which a GPU goes from one half to the other, since the thread's own is where the model computes
    result: "concurrent.futures.Future[Tensor]" = field(default_factory=concurrent.futures.Future)
    second: Pending[Tensor] | None = None

    def join(self) -> None:
        """Have the current stream wait for the mean."""
        if self.second is not None:
            self.second.wait()


class ReplicaAverages:
    """Averages reduced shards over replicas, each as soon as its node's half is done, while other units are still at that half.

    The averages start in the order in which they were asked for, which is the same on all ranks, whatever the order in which the halves
    end.
    """

    def __init__(self, comms: Communicators) -> None:
        self._comms = comms
        self._waiting: deque[_Average] = deque()
        self._lock = threading.Lock()  # halves end on the loop thread, or at once on the caller's
        self._streams: dict[torch.device, Stream] = {}

    def follow(self, first: Pending[Tensor], label: str, device: torch.device) -> Pending[Tensor]:
        """A handle for the mean over replicas of what `first` gives, which was computed on that device."""
        average = _Average(first, label, self._stream(device))
        with self._lock:
            self._waiting.append(average)
        first.add_done_callback(lambda _: self._advance())
        return Pending(average.result, f"average of {label}", average.join)

    def _stream(self, device: torch.device) -> Stream | None:
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = new_stream(device)
        return self._streams[device]

    def _advance(self) -> None:
        with self._lock:
            while self._waiting and self._waiting[0].first.done():
                average = self._waiting.popleft()
                with using(average.stream):
                    self._start(average)

    def _start(self, average: _Average) -> None:
        error = average.first.exception()
        if error is not None:
            self._refuse(average, error)
            return
        shard = average.first.wait()
        try:
            average.second = self._comms.averages.all_reduce(shard, ReduceOp.MEAN, out=shard, label=average.label)
        except BaseException as failure:  # noqa: BLE001 - whatever it is belongs to the awaiter
            average.result.set_exception(failure)
            return
        average.second.add_done_callback(lambda done: _pass_on(done, average))

    def _refuse(self, average: _Average, error: BaseException) -> None:
        """The node's half failed: the replicas, whose halves may have succeeded, must not wait."""
        average.result.set_exception(error)
        self._comms.averages.refuse(error, label=average.label)


def _pass_on(done: Pending[Tensor], average: _Average) -> None:
    with using(average.stream):
        error = done.exception()
        if error is None:
            average.result.set_result(done.wait())
        else:
            average.result.set_exception(error)
