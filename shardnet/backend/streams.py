"""Copies between a GPU's memory and the CPU's, on streams of their own: `CopyStreams`; and events of a stream: `now`, `join`.

Nothing here waits for a GPU, except `Copy.wait`. For tensors that are already on the CPU every call is done when it returns: torch has
dummy streams and events for them.
"""

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

Tensor = torch.Tensor
Stream = Any  # torch.cuda.Stream; torch's own type of it depends on the device
Event = Any  # torch.cuda.Event


def is_on_gpu(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def now(device: torch.device) -> Event:
    """An event that happens when the work queued so far on this thread's current stream of a device is done."""
    event = _event(device)
    event.record(current_stream(device))
    return event


def join(event: Event, device: torch.device) -> None:
    """Make the work queued from now on on this thread's current stream wait for an event. The thread itself does not wait."""
    current_stream(device).wait_event(event)


def current_stream(device: torch.device) -> Stream:
    return torch.get_device_module(device).current_stream(device)


def new_stream(device: torch.device) -> Stream:
    return torch.cuda.Stream(device) if device.type == "cuda" else torch.cpu.Stream()  # type: ignore[no-untyped-call]


def using(stream: Stream | None) -> AbstractContextManager[object]:
    """A `with` block whose work goes to that stream, if it is a CUDA stream."""
    return torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else contextlib.nullcontext()


def _event(device: torch.device) -> Event:
    # blocking: a thread that synchronises sleeps meanwhile and leaves the processor to those that compute
    return torch.cuda.Event(enable_timing=True, blocking=True) if device.type == "cuda" else torch.cpu.Event()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One copy queued on a stream; keeps source and target alive until it is dropped."""

    source: Tensor
    target: Tensor
    begin: Event
    end: Event

    @property
    def is_done(self) -> bool:
        return bool(self.end.query())

    def wait(self) -> None:
        """Block this thread, asleep, until the copy is done."""
        self.end.synchronize()

    @property
    def duration_ns(self) -> int:
        """How long the copy took, once it is done; 0 without a GPU."""
        return round(self.begin.elapsed_time(self.end) * 1e6) if isinstance(self.begin, torch.cuda.Event) else 0


class CopyStreams:
    """Two streams for copies, to and from one device, each in the order of the calls. Any thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out = new_stream(device)
        self._into = new_stream(device)

    def host_like(self, tensor: Tensor) -> Tensor:
        """New CPU memory for the content of a tensor; pinned, so that a GPU copies to and from it in parallel with other work."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=self.device.type == "cuda")

    def fetch(self, source: Tensor, after: Event) -> Copy:
        """Copy a tensor from the device to the CPU once `after` has happened there."""
        return self._copy(source, self.host_like(source), self._out, after)

    def place(self, source: Tensor, target: Tensor, after: Event) -> Copy:
        """Copy pinned memory to the device once `after` has happened there."""
        return self._copy(source, target, self._into, after)

    def _copy(self, source: Tensor, target: Tensor, stream: Stream, after: Event) -> Copy:
        begin, end = _event(self.device), _event(self.device)
        with using(stream), torch.inference_mode():  # in this mode both tensors made in it and others may be written
            stream.wait_event(after)
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        return Copy(source, target, begin, end)
