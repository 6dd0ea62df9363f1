"""`Bucket`: parameters whose gradients are reduced, and whose new values are gathered, as one flat buffer.

[Note: whole parameters, owned pieces] Every rank holds every parameter whole, as views of the bucket's flat buffer. A
rank owns its shard of that buffer: the wrapped optimizer sees the rank's part of each parameter, the piece, and steps
the piece in place. Then the pieces of all ranks are gathered into the same memory.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto

import torch
from torch import nn

from shardnet.backend import Pending, ReduceOp
from shardnet.backend.streams import Stream, current_stream, using
from shardnet.errors import CollectiveError, StateError, UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.gradients import GradientBuffer
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.precision import Dtypes
from shardnet.sharding import FlatLayout, ParameterSlice

Tensor = torch.Tensor


class BucketState(Enum):
    """Who may touch the flat buffer, and what may come next."""

    COMPLETE = auto()  # everything is there; the module reads it, the user and the optimizer may write. Next: GATHERING
    GATHERING = (
        auto()
    )  # stepped; the collective, once its turn has come, writes the rest; nobody else may read or write. Next: COMPLETE, TORN
    TORN = auto()  # a gather failed, and old values are mixed with new ones. Final


@dataclass(slots=True, eq=False)
class _Gather:
    """One gather of a bucket's parameters, from the step to their arrival."""

    side: Stream  # on which it starts and ends: see [Note: gathers on a GPU]
    stepping: Stream  # on which the optimizer has stepped
    arrived: "concurrent.futures.Future[None]" = field(default_factory=concurrent.futures.Future)
    handle: Pending[Tensor] | None = None  # once it is over

    def end(self, handle: Pending[Tensor]) -> None:
        """The collective is over, whether it has succeeded or failed."""
        self.handle = handle
        try:
            with using(self.side):  # this waits for the result: on the loop thread's own stream all that computes there would, too
                error = handle.exception()
        except BaseException as failure:  # noqa: BLE001 - a GPU's: whatever it is belongs to those who wait for the parameters
            error = failure
        if error is None:
            self.arrived.set_result(None)
        else:
            self.arrived.set_exception(error)

    @property
    def has_failed(self) -> bool:
        return self.arrived.done() and self.arrived.exception() is not None

    def join(self) -> None:
        """Have the current stream wait for the parameters, and the one that steps them, since whoever waits first is the only one to."""
        assert self.handle is not None, "only a gather that has succeeded is joined"
        self.handle.wait()
        with using(self.stepping):
            self.handle.wait()


class Bucket:
    """Some parameters of one dtype, device and unit; lives as long as the optimizer.

    See [Note: whole parameters, owned pieces].
    """

    def __init__(
        self,
        label: str,
        named: Sequence[tuple[str, Tensor]],
        layout: FlatLayout,
        comms: Communicators,
        meter: MemoryMeter,
        pool: BufferPool,
    ) -> None:
        self.label = label  # equal on all ranks: names the collectives
        self.parameters = tuple(parameter for _, parameter in named)
        self.born_frozen = not any(parameter.requires_grad for parameter in self.parameters)  # equal on all ranks
        self.layout = layout
        self.state = BucketState.COMPLETE
        self._names = tuple(name for name, _ in named)
        self._comms = comms
        self._gather: _Gather | None = None  # if not COMPLETE
        self._pending = Pending.done_with(None, "all_gather")
        self._flat = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])  # [N]
        self._views = layout.views(self._flat)
        self._shard = layout.shard(self._flat, comms.shard_rank)
        same = Dtypes(master=self._flat.dtype, compute=self._flat.dtype, reduce=self._flat.dtype)
        self._gradients = GradientBuffer(layout, same, self._flat.device, gauge=meter.full_gradients, pool=pool)
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.data = view

    @property
    def device(self) -> torch.device:
        return self._flat.device

    def slices(self, rank: int | None = None) -> dict[Tensor, ParameterSlice]:
        """What a rank (by default this one) owns of each parameter, possibly nothing."""
        rank = self._comms.shard_rank if rank is None else rank
        return dict(zip(self.parameters, self.layout.slices(rank), strict=True))

    def make_pieces(self, *, whole: bool) -> dict[Tensor, nn.Parameter]:
        """This rank's part of each parameter that it owns some of: 1-D, or in the parameter's shape if `whole`."""
        pieces = {}
        for (parameter, piece), view in zip(
            self.slices().items(), self.layout.shard_views(self._shard, self._comms.shard_rank), strict=True
        ):
            if piece.numel:
                keep_shape = whole or not piece.shape  # state of a 0-dim parameter is 0-dim, too
                pieces[parameter] = nn.Parameter(view.view(piece.shape) if keep_shape else view)
        return pieces

    def copy_from_root(self, root: int) -> Pending[Tensor]:
        """Overwrite every parameter with another rank's. The buffer belongs to the collective until the handle is done."""
        return self._comms.everyone.broadcast(self._flat, root, out=self._flat, label=f"{self.label} (initial)")

    def reattach(self) -> None:
        """Copy parameters back into the buffer whose `.data` was set to other memory, as vector_to_parameters and weight averaging do."""
        for name, parameter, view in zip(self._names, self.parameters, self._views, strict=True):
            if parameter.shape != view.shape or parameter.dtype != view.dtype or parameter.device != view.device:
                raise UsageError(
                    f"{name} became {parameter.dtype} {list(parameter.shape)} on {parameter.device}, and was {view.dtype} "
                    f"{list(view.shape)} on {view.device} when its optimizer was made: convert the module before making the optimizer"
                )
            if view.numel() and parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.detach())
                parameter.data = view

    # --- gradients

    def start_reduction(self) -> tuple[Tensor, Pending[Tensor]]:
        """Average the parameters' gradients over ranks, missing ones as zeros.

        Returns the packed gradients [N], which the caller must give back with `end_reduction`, and a handle for this rank's part of the
        mean.
        """
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._gradients.add(index, parameter.grad)
        packed = self._gradients.take()
        try:
            return packed, self._comms.reductions.reduce_scatter(packed, ReduceOp.MEAN, sizes=self.layout.sizes, label=self.label)
        except BaseException:
            self.end_reduction(packed)
            raise

    def end_reduction(self, packed: Tensor) -> None:
        """Take back what `start_reduction` gave; the collective must be done with it."""
        self._gradients.returned(packed)

    def split_gradient(self, part: Tensor) -> dict[Tensor, Tensor]:
        """This rank's part [shard] of the flat gradient, as a 1-D view for each parameter."""
        return dict(zip(self.parameters, self.layout.shard_views(part, self._comms.shard_rank), strict=True))

    def own_gradients(self) -> dict[Tensor, Tensor]:
        """A copy of the part of each gradient that belongs to this rank's piece, 1-D; nothing is reduced."""
        return {
            parameter: parameter.grad.detach().reshape(-1)[piece.start : piece.stop].clone()
            for parameter, piece in self.slices().items()
            if parameter.grad is not None
        }

    # --- parameters

    def stepped(self, side: Stream) -> None:
        """COMPLETE → GATHERING: this rank's pieces are new; `start_gather` follows, on the stream `side`."""
        assert self.state is BucketState.COMPLETE, self.label
        self.state = BucketState.GATHERING
        stepping = current_stream(self.device)
        side.wait_stream(stepping)
        self._gather = _Gather(side, stepping)
        self._pending = Pending(self._gather.arrived, f"all_gather of {self.label}", self._gather.join)

    def start_gather(self, on_end: Callable[[], None]) -> None:
        """Send this rank's pieces, receive the others'. Any thread. `on_end` is called when that has succeeded or failed, on any thread.

        Raises nothing but a Ctrl-C: on the loop thread an error would only be logged. Whatever it is, `finish_gather` raises it.
        """
        gather = self._gather
        assert gather is not None, self.label

        def end(handle: Pending[Tensor]) -> None:
            gather.end(handle)
            on_end()

        try:
            with using(gather.side):
                handle = self._comms.gathers.all_gather(self._shard, sizes=self.layout.sizes, out=self._flat, label=self.label)
        except Exception as error:  # noqa: BLE001 - whatever it is belongs to those who wait for the parameters
            self._refuse(error)
            gather.arrived.set_exception(error)
            on_end()
        except BaseException as interrupt:  # a collective that has its number has told the others; this is for those who wait here
            gather.arrived.set_exception(CollectiveError(f"the gather of {self.label} was interrupted ({type(interrupt).__name__})"))
            on_end()
            raise
        else:
            handle.add_done_callback(end)

    def _refuse(self, error: BaseException) -> None:
        """Nothing was sent: the other ranks must not wait, nor take the next bucket's gather for this one."""
        with suppress(Exception):  # the backend is closed, or cannot tell them: then they find out for themselves
            self._comms.gathers.refuse(error, label=self.label)

    def finish_gather(self) -> None:
        """GATHERING → COMPLETE: block until every parameter is there. Does nothing if COMPLETE.

        Raises the error of the gather, which may be torch's, if it failed, and StateError from then on: the parameters are TORN.
        """
        if self.state is BucketState.TORN:
            raise StateError(
                f"the parameters of {self.label} are a mixture of old and new values, because gathering them failed; "
                "load a checkpoint into the module and make a new optimizer"
            )
        if self.state is BucketState.GATHERING:
            assert self._gather is not None, self.label
            try:
                self._comms.wait(self._pending, f"gather {self.label}")
            except BaseException:
                if self._gather.has_failed:  # otherwise it was a Ctrl-C, and the gather goes on
                    self.state = BucketState.TORN
                raise
            self.state, self._gather = BucketState.COMPLETE, None


Owned = tuple[int | None, Bucket]  # a bucket, with the number of the unit that waits for it; None: no unit does
