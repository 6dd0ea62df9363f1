"""`Staging`: collectives of tensors on a GPU, over a mesh that moves memory of the CPU.

[Note: staging] What a rank gives is copied into pinned memory, goes from there as any collective does, and what comes is copied to the GPU.
The copies run on streams of their own, in each direction one, beside what the GPU computes and beside other collectives; nothing
waits for the GPU but a thread that looks after copies. A collective has its number from the moment of the call, so the order of calls is
the order of collectives; its data follows when the GPU has come so far. So one of the GPU and one of the CPU that are called one after
the other need not end in that order.

The result is there in the order of streams ([Note: results on a GPU]). The caller's current stream counts at the call: the input is what
it will have written by then, and the output is not overwritten before it has done what it was given.
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
Plan = Callable[[Array, Array], Algorithm]  # of what this rank gives and what it gets, on the CPU; empty where it gives or gets nothing

_NOTHING = torch.empty(0, device="cpu")


class Staging:
    """The way of one backend's tensors to and from the GPUs of this rank; lives as long as its mesh. Any thread may call it."""

    def __init__(
        self,
        board: Switchboard,
        is_staged: Callable[[Tensor], bool] = is_on_gpu,
        streams: Callable[[torch.device], CopyStreams] = CopyStreams,
    ) -> None:
        self._board = board
        self._is_staged = is_staged
        self._make_streams = streams
        self._lock = threading.Lock()  # over what follows, for no longer than it takes: the loop thread needs it, too
        self._streams: dict[torch.device, CopyStreams] = {}
        self._watchers: dict[TransferDirection, concurrent.futures.ThreadPoolExecutor] = {}

    def begin(
        self, group: Group, call: Call, plan: Plan, gives: Tensor | None, gets: Tensor | None, value: T, after: Event | None = None
    ) -> Pending[T]:
        """Start a collective of which this rank `gives` one contiguous tensor and `gets` another one, or nothing. Its handle has `value`.

        Each may be on a GPU. What is given is read when `after` has happened, or when what the current stream has been given is done.
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
        """What is given, where the CPU has it once the copy, if it needs one, is done."""
        if gives is None or not self._is_staged(gives):
            return _NOTHING if gives is None else gives, None
        copy = self._to_and_from(gives.device).fetch(gives, after or now(gives.device))
        return copy.target, copy

    def _prepare(self, gets: Tensor | None) -> tuple[Tensor, Callable[[], Copy] | None]:
        """Where what comes is put on the CPU, and what copies it from there to where it belongs, if that is elsewhere."""
        if gets is None or not self._is_staged(gets):
            return _NOTHING if gets is None else gets, None
        streams = self._to_and_from(gets.device)
        host, writable = streams.host_like(gets), now(gets.device)

        def place() -> Copy:
            copy = streams.place(host, gets, writable)
            # it keeps both ends until the copy is done, whoever else lets go of them: a GPU's allocator would hand the memory on meanwhile
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
    """A thread that waits for copies in one direction, in the order of the calls; until the mesh is closed, or nobody has it any more."""
    watcher = concurrent.futures.ThreadPoolExecutor(1, name)
    watcher.submit(help_out)  # starts it
    board.loop.call(board.at_end.append, partial(_shut_down, weakref.ref(watcher)))
    return watcher


def _shut_down(watcher: "weakref.ref[concurrent.futures.ThreadPoolExecutor]", _: bool) -> "list[asyncio.Future[None]]":
    """End a thread, unless nobody has it any more: then it has ended. It does so behind the copy that it waits for, which needs nobody."""
    if (executor := watcher()) is not None:
        executor.shutdown(wait=False)
    return []


class _Arrival:
    """Has the current stream wait for a result's way to the GPU, if it had one."""

    def __init__(self) -> None:
        self.copy: Copy | None = None

    def __call__(self) -> None:
        if self.copy is not None:
            join(self.copy.end, self.copy.target.device)
