"""`Staging`: collectives of tensors on a GPU, over a mesh that moves CPU memory.

[Note: staging] A rank's input is copied into pinned memory and goes from there like any collective; the result is copied to the GPU.
The copies run on their own streams, one per direction, in parallel with the GPU's computation and with other collectives. Only the threads
that look after copies wait for the GPU. A collective gets its number at the call, so the order of calls is the order of collectives; its
data follows when the GPU has got that far. So of two collectives that are called one after the other, one on the GPU and one on the CPU,
the second may end first.

The result is ready in stream order ([Note: results on a GPU]). The caller's current stream counts, as it is at the call: the input is read,
and the output overwritten, only after the work queued on it by then is done.
"""

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from shardnet.backend.pending import Pending
from shardnet.backend.streams import Copy, CopyStreams, Event, is_on_gpu, join, now
from shardnet.collectives.group import Group
from shardnet.collectives.operation import Algorithm, Call, Operation
from shardnet.collectives.reduction import Array, as_array
from shardnet.collectives.switchboard import Switchboard
from shardnet.loop import help_out
from shardnet.telemetry import TransferDirection

T = TypeVar("T")
Tensor = torch.Tensor
Plan = Callable[[Array, Array], Algorithm]  # of this rank's input and output arrays, on the CPU; empty if it gives or gets nothing

_NOTHING = torch.empty(0, device="cpu")


class Staging:
    """Moves one backend's tensors to and from the GPUs of this rank; lives as long as its mesh. Any thread may call it."""

    def __init__(
        self,
        board: Switchboard,
        is_staged: Callable[[Tensor], bool] = is_on_gpu,
        streams: Callable[[torch.device], CopyStreams] = CopyStreams,
    ) -> None:
        self._board = board
        self._is_staged = is_staged
        self._make_streams = streams
        self._lock = threading.Lock()  # over what follows; held only briefly, because the loop thread needs it, too
        self._streams: dict[torch.device, CopyStreams] = {}
        self._watchers: dict[TransferDirection, concurrent.futures.ThreadPoolExecutor] = {}

    def begin(
        self, group: Group, call: Call, plan: Plan, gives: Tensor | None, gets: Tensor | None, value: T, after: Event | None = None
    ) -> Pending[T]:
        """Start a collective to which this rank `gives` one contiguous tensor and from which it `gets` another one; None: nothing. Its
        handle's result is `value`.

        Each may be on a GPU. `gives` is read when `after` has happened or, without `after`, when the work queued on the current stream is
        done.
        """
        given, fetched = self._fetch(gives, after)
        got, place = self._prepare(gets)
        arrival = _Arrival()

        async def run(op: Operation) -> None:
            await plan(as_array(given), as_array(got))(op)
            if place is not None:
                arrival.copy = place()

        prelude = None if fetched is None else partial(self._arrived, fetched)
        return Pending(group.operations.begin(call, run, value, prelude=prelude), call.op, arrival)

    def _fetch(self, gives: Tensor | None, after: Event | None) -> tuple[Tensor, Copy | None]:
        """The CPU tensor that holds the input, and the copy that must be done first, if one is needed."""
        if gives is None or not self._is_staged(gives):
            return _NOTHING if gives is None else gives, None
        copy = self._to_and_from(gives.device).fetch(gives, after or now(gives.device))
        return copy.target, copy

    def _prepare(self, gets: Tensor | None) -> tuple[Tensor, Callable[[], Copy] | None]:
        """The CPU tensor that receives the output, and a function that copies it from there to the GPU, if it belongs there."""
        if gets is None or not self._is_staged(gets):
            return _NOTHING if gets is None else gets, None
        streams = self._to_and_from(gets.device)
        host, writable = streams.host_like(gets), now(gets.device)

        def place() -> Copy:
            copy = streams.place(host, gets, writable)
            # this keeps source and target alive until the copy is done: otherwise a GPU's allocator could hand the memory on meanwhile
            self._watchers[TransferDirection.CPU_TO_GPU].submit(self._watch, copy)
            return copy

        return host, place

    async def _arrived(self, fetched: Copy) -> None:
        """Wait for a copy from a GPU; on the loop thread."""
        if not fetched.is_done:
            await asyncio.wrap_future(self._watchers[TransferDirection.GPU_TO_CPU].submit(fetched.wait))
        self._count(fetched, TransferDirection.GPU_TO_CPU)

    def _watch(self, placed: Copy) -> None:
        placed.wait()
        self._count(placed, TransferDirection.CPU_TO_GPU)

    def _to_and_from(self, device: torch.device) -> CopyStreams:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = self._make_streams(device)
                for direction in TransferDirection if not self._watchers else ():
                    self._watchers[direction] = _watcher(self._board, f"shardnet-{direction}")
            return self._streams[device]

    def _count(self, copy: Copy, direction: TransferDirection) -> None:
        self._board.telemetry.count_transfer(direction, copy.duration_ns, copy.target.nbytes)


def _watcher(board: Switchboard, name: str) -> concurrent.futures.ThreadPoolExecutor:
    """A thread that waits for copies in one direction, in the order of the calls; until the mesh closes, or nothing refers to it."""
    watcher = concurrent.futures.ThreadPoolExecutor(1, name)
    watcher.submit(help_out)  # starts it
    board.loop.call(board.at_end.append, partial(_shut_down, weakref.ref(watcher)))
    return watcher


def _shut_down(watcher: "weakref.ref[concurrent.futures.ThreadPoolExecutor]", _: bool) -> "list[asyncio.Future[None]]":
    """End a watcher thread, if it still exists. It ends after the copies that it waits for, which need no other rank."""
    if (executor := watcher()) is not None:
        executor.shutdown(wait=False)
    return []


class _Arrival:
    """Makes the current stream wait for the copy of a result to the GPU, if there was one."""

    def __init__(self) -> None:
        self.copy: Copy | None = None

    def __call__(self) -> None:
        if self.copy is not None:
            join(self.copy.end, self.copy.target.device)
