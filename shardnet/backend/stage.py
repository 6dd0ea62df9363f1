"""`Stage` and `Journey`: where a collective's data is moved by torch, and its way from one stage to the next."""

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
Work = Callable[["Journey"], Sequence[Pending[Any]]]  # what a stage begins, and what of it goes over the mesh


class Stage:
    """A line of collectives, the process group on which they are launched, and a stream beside the user's; lives until it is closed.

    [Note: streams of torch] On a GPU all that a stage does is in the order of its own stream, which waits for what the user's stream had to
    do when the collective was called, and for the stage before. Each stage has its own: collectives of different stages come in another
    order on each rank, and on one stream they would wait for each other across ranks.
    """

    def __init__(self, name: str, group: TorchGroup | None = None) -> None:
        """Without a process group it only begins what goes over the mesh."""
        self.group = group
        self.line = Line(name, self._end)
        self._broken = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}  # on the line's thread

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = _cuda.Stream(device)
        return self._streams[device]

    def close(self, *, broken: bool) -> None:
        """End the thread and the process group. `broken`: without waiting for what is under way."""
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
        """`tensors` are the caller's. On a GPU it begins in the order of the caller's current stream, and `after` that event."""
        self._device = device
        self._after = after
        self._tensors = list(tensors)
        self._ready: torch.cuda.Event | None = None  # behind the last that was done with them
        if device.type == "cuda":
            self._ready = _cuda.Event()
            self._ready.record(torch.cuda.current_stream(device))
        self.operation: Operation | None = None  # while it is at a stage
        self.over_mesh: Sequence[Pending[Any]] = ()  # what the last stage has begun

    def keep(self, tensor: Tensor) -> Tensor:
        """Have a tensor that was made at a stage for the next one as long as that needs it."""
        self._tensors.append(tensor)
        return tensor

    def take(self, pending: Pending[Tensor]) -> Tensor:
        """What has come over the mesh for this stage."""
        came = pending.wait()
        if came.device.type == "cuda":
            came.record_stream(torch.cuda.current_stream(came.device))
        return came

    def job(self, stage: Stage, work: Work, op: Operation) -> Job:
        """What the line of a stage is given to do for the collective."""

        def run() -> None:
            self.operation = op
            if stage.group is not None:
                stage.group.operation = op
            try:
                self._run(stage, work)
            finally:
                self.operation = None  # it knows this, and the backend, which may be dropped
                if stage.group is not None:
                    stage.group.operation = None

        return run

    def forget(self) -> None:
        """It is at its end: who keeps its handle need not keep what it was given."""
        self._tensors.clear()
        self.over_mesh = ()

    def arrive(self) -> None:
        """Have the current stream wait for the result: see [Note: results on a GPU]."""
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
            for tensor in self._tensors:  # its memory is used again only behind what this stream does with it
                tensor.record_stream(side)
            self.over_mesh = work(self)
            self._ready = _cuda.Event()
            self._ready.record(side)
