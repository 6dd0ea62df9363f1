"""`Stage` and `Journey`: a place where torch moves a collective's data, and the data's way from one stage to the next."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardnet.backend.line import Job, Line
from shardnet.backend.pending import Pending
from shardnet.backend.streams import Event
from shardnet.backend.torch_group import TorchGroup
from shardnet.collectives.operation import Operation

Tensor = torch.Tensor
_cuda: Any = torch.cuda  # which torch has not annotated
Work = Callable[["Journey"], Sequence[Pending[Any]]]  # does a stage's part; returns the handles of what it has begun over the mesh


class Stage:
    """A line of collectives, the process group on which they are launched, and a CUDA stream of its own; lives until it is closed.

    [Note: streams of torch] On a GPU a stage does all its work in the order of its own stream. This stream waits for the work that was
    queued on the user's stream when the collective was called, and for the stage before. Each stage has its own stream: the order of
    collectives of different stages differs between ranks, and on one stream they would wait for each other across ranks.
    """

    def __init__(self, name: str, group: TorchGroup | None = None) -> None:
        """Without a process group it only begins transfers over the mesh."""
        self.group = group
        self.line = Line(name, self._end)
        self._broken = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # on the line's thread

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = _cuda.Stream(device)
        return self._streams[device]

    def close(self, *, broken: bool) -> None:
        """End the thread and the process group. If `broken`, do not wait for what is under way."""
        self._broken = self._broken or broken
        if self.group is not None:
            self.group.give_up()
        self.line.close()

    def _end(self) -> None:
        if not self._broken:
            for stream in self._streams.values():
                stream.synchronize()
        if self.group is not None:
            self.group.dispose(broken=self._broken)


class Journey:
    """One collective's tensors on their way from the caller over the stages."""

    def __init__(self, device: torch.device, *tensors: Tensor, after: Event | None = None) -> None:
        """`tensors` are the caller's. On a GPU the work begins in the order of the caller's current stream, and after the event `after`."""
        self._device = device
        self._after = after
        self._tensors = list(tensors)
        self._ready: torch.cuda.Event | None = None  # after the last work on the tensors
        if device.type == "cuda":
            self._ready = _cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))
        self.operation: Operation | None = None  # while it is at a stage
        self.over_mesh: Sequence[Pending[Any]] = ()  # what the last stage has begun

    def keep(self, tensor: Tensor) -> Tensor:
        """Keep a tensor that one stage makes for the next, as long as that needs it."""
        self._tensors.append(tensor)
        return tensor

    def take(self, pending: Pending[Tensor]) -> Tensor:
        """Wait for data that comes over the mesh for this stage, and return it."""
        came = pending.wait()
        if came.device.type == "cuda":
            came.record_stream(torch.cuda.current_stream(came.device))
        return came

    def job(self, stage: Stage, work: Work, op: Operation) -> Job:
        """The job that the line of a stage does for the collective."""

        def run() -> None:
            self.operation = op
            if stage.group is not None:
                stage.group.operation = op
            try:
                self._run(stage, work)
            finally:
                self.operation = None  # it refers to this journey, and to the backend, which may have been dropped
                if stage.group is not None:
                    stage.group.operation = None

        return run

    def forget(self) -> None:
        """Drop the tensors at the end: a caller that keeps the handle should not keep them alive."""
        self._tensors.clear()
        self.over_mesh = ()

    def arrive(self) -> None:
        """Make the current stream wait for the result: see [Note: results on a GPU]."""
        if self._ready is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ready)

    def _run(self, stage: Stage, work: Work) -> None:
        if self._ready is None:
            self.over_mesh = work(self)
            return
        side = stage.stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(side):
            side.wait_event(self._ready)
            if self._after is not None:
                side.wait_event(self._after)
            for tensor in self._tensors:  # its memory must not be used again before this stream has finished with it
                tensor.record_stream(side)
            self.over_mesh = work(self)
            self._ready = _cuda.Event()
            self._ready.record(side)
