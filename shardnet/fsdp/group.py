"""`FlatGroup`: parameters that are gathered and reduced together, as one flat buffer.

[Note: two sets of parameters] The parameters that the module was made with stay its parameters for ever. Each is 1-D
and views this rank's slice of it, possibly empty, in the group's shard: optimizers, `clip_grad_norm_` and any other
code that kept a reference see these. While a unit computes, its modules hold other tensors in their places: leaves in
the full shape that view the full buffer. Autograd puts their gradients on the leaves, from where they are collected.

[Note: parameters that change] An optimizer may step between forward and backward: then backward gathers other values than forward
computed with, and gradients would be wrong. Autograd raises where a saved tensor has another version than when it was saved. So a leaf
gets a new version when it is shown, if its parameter has got one since the last time. A backward that reads the leaf then raises, as
it would in one process; a backward that does not read it goes on.

[Note: writes that would be lost] A forward may write to a parameter, as `nn.Embedding(max_norm=...)` does. The write then reaches the
leaf's memory, which is freed with the unit, or it gives the leaf other memory, which the next gather does not fill. A forward may also
write to slices of a unit that is already being gathered; the unit would then compute with the old values. Both raise StateError. Where
a rank has all of a group, the leaf's memory is the shard's, and the write lasts.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from shardnet.backend import NodeBuffer, Pending
from shardnet.backend.streams import is_on_gpu
from shardnet.errors import SizeMismatchError, StateError, UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.compressed.across import CompressedAcross
from shardnet.fsdp.compressed.gather import CompressedGather
from shardnet.fsdp.compressed.reduction import CompressedReduction
from shardnet.fsdp.compressed.residual import Residual
from shardnet.fsdp.compressed.wire_memory import WireMemory
from shardnet.fsdp.compression import Compression
from shardnet.fsdp.elsewhere import Elsewhere
from shardnet.fsdp.full_buffer import FullBuffer, WholeShard
from shardnet.fsdp.gradients import GradientBuffer
from shardnet.fsdp.lent_gradients import LentGradients
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.placement import PlacedParameter
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.precision import Dtypes
from shardnet.fsdp.secondary import SecondaryShard
from shardnet.sharding import FlatLayout, ParameterSlice
from shardnet.uncompiled import uncompiled

Tensor = torch.Tensor
Gathering = Pending[Any]  # of a Tensor, or of a NodeBuffer
OnGradient = Callable[["FlatGroup", int], None]
_MARK = "_shardnet_unit"  # attribute of a parameter that is sharded: the label of its group


def sharded_by(parameter: Tensor) -> str | None:
    """The group whose slice this parameter is; None for one that is whole."""
    return getattr(parameter, _MARK, None)


@uncompiled
class FlatGroup:
    """Parameters of one unit, dtypes, device and `requires_grad`; lives as long as the wrapped model.

    The shard has the dtype that the parameters were made with, the full buffer and the leaves that of `dtypes.compute`.
    See [Note: two sets of parameters] and [Note: flat layout].
    """

    def __init__(
        self,
        label: str,
        placed: Sequence[PlacedParameter],
        dtypes: Dtypes,
        compression: Compression,
        comms: Communicators,
        meter: MemoryMeter,
        pool: BufferPool,
        compute_device: torch.device | None = None,
    ) -> None:
        """`compute_device` is where the group is gathered if its shards, gradients and optimizer state stay on the CPU."""
        self.label = label  # equal on all ranks: names the collectives
        self.placed = tuple(placed)
        self.originals = tuple(entry.parameter for entry in placed)
        self._comms = comms
        self._dtypes = dtypes
        self._offloads = compute_device is not None
        device = compute_device or self.originals[0].device
        self.layout = FlatLayout([(entry.name, entry.parameter.shape) for entry in placed], comms.shard_count)
        home = torch.device("cpu") if self._offloads else device
        self.shard = torch.empty(self.layout.sizes[comms.shard_rank], dtype=dtypes.master, device=home)  # 1-D, this rank's part
        self._slices = self.layout.shard_views(self.shard, comms.shard_rank)
        self._full: FullBuffer | WholeShard
        if comms.shard_count == 1 and dtypes.compute == dtypes.master and not self._offloads:
            self._full = WholeShard(self.shard)
        else:
            self._full = FullBuffer(self.layout.numel, dtypes.compute, device, owner=label, gauge=meter.full_parameters, pool=pool)
        self._views = self.layout.views(self._full.tensor.detach())
        # made from `data`, so that each has a version counter of its own
        self.leaves = [nn.Parameter(view.data, requires_grad=False) for view in self._views]
        # each leaf's offset in the buffer in bytes, and its number of elements; None for a leaf without elements, which has no address
        self._places = [(leaf.data_ptr() - self._full.tensor.data_ptr(), leaf.numel()) if leaf.numel() else None for leaf in self.leaves]
        self._versions = [0] * len(self.leaves)  # of the parameters, when they were last shown
        self._shown = [0] * len(self.leaves)  # versions of the leaves, at that time
        self._gathered = [0] * len(self.leaves)  # versions of the parameters, when a gather began to read them
        self._full.free()
        self._arriving: Pending[NodeBuffer] | None = None
        self._secondary: SecondaryShard | None = None
        if comms.neighbours is not None:
            self._secondary = SecondaryShard(
                self.layout.numel, dtypes.compute, device, comms.neighbours, gauge=meter.secondary_shards, pool=pool
            )
        wire = WireMemory(device, meter.packed, pool)
        self._compressed_gather: CompressedGather | None = None
        if (codec := compression.weight_codec(dtypes)) is not None:
            self._compressed_gather = CompressedGather(codec, self.layout, comms.gathers, wire)
        self.compressed_reduction: CompressedReduction | CompressedAcross | None = None
        lends = comms.lends_gradients
        if (codec := compression.gradient_codec(dtypes)) is not None:
            residual = Residual(compression.residual, device, meter.residuals)
            if comms.grid is not None and device.type == "cpu":
                self.compressed_reduction = CompressedAcross(codec, self.layout, comms.grid, comms.packer, residual, wire)
                lends = comms.grid.inside.lends_pieces
            else:
                self.compressed_reduction, lends = CompressedReduction(codec, self.layout, comms, residual, wire), False
        self.gradients: GradientBuffer | LentGradients
        if lends and device.type == "cpu" and dtypes.reduces_as_it_comes:
            self.gradients = LentGradients(self.layout, dtypes.reduce, gauge=meter.full_gradients)
        else:
            self.gradients = GradientBuffer(self.layout, dtypes, device, gauge=meter.full_gradients, pool=pool)
        self._on_gradient: OnGradient = lambda group, index: None
        self._on_gradient_from_elsewhere: OnGradient = lambda group, index: None
        self._watched: set[int] = set()  # leaves with a gradient hook
        self._owed = frozenset[int]()  # parameters that got gradients in backwards that did not reduce them, frozen since then or not
        self.elsewhere = Elsewhere(self._take_from_elsewhere)

    # --- content

    @property
    def slices(self) -> tuple[ParameterSlice, ...]:
        """What this rank holds of each parameter."""
        return self.layout.slices(self._comms.shard_rank)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parameters, in the module."""
        return tuple(entry.name for entry in self.placed)

    @property
    def replica_count(self) -> int:
        """How many ranks hold the same shard, this one included."""
        return self._comms.replica_count

    @property
    def trainable(self) -> list[int]:
        """Indices of the parameters that get gradients; follows `requires_grad_` calls made after wrapping."""
        return [index for index, parameter in enumerate(self.originals) if parameter.requires_grad]

    @property
    def awaits_reduction(self) -> bool:
        """Whether it has gradients to reduce, now or as soon as backward brings them. The same on all ranks."""
        return bool(self.trainable or self._owed)

    @property
    def device(self) -> torch.device:
        """Where the group is gathered, and where autograd makes its gradients."""
        return self._full.tensor.device

    @property
    def computes_with_shard(self) -> bool:
        """Whether modules see the shard itself: this rank has all of the group, in the dtype that it is computed in."""
        return isinstance(self._full, WholeShard)

    @property
    def full_bytes(self) -> int:
        return self.layout.numel * self._dtypes.compute.itemsize

    @property
    def full_is_allocated(self) -> bool:
        return self._full.allocated

    def flatten(self) -> Tensor:
        """The parameters as they were before sharding, end to end [N]."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.originals])

    def adopt(self, flat: Tensor) -> None:
        """Take this rank's part of `flat` [N], and make the parameters views of it: from now on they are sharded."""
        self.shard.copy_(self.layout.shard(flat, self._comms.shard_rank))
        for parameter, piece in zip(self.originals, self._slices, strict=True):
            parameter.data = piece
            parameter.grad = None
            setattr(parameter, _MARK, self.label)
        if self._comms.shard_count == 1 and self._comms.replica_count > 1:
            for index, parameter in enumerate(self.originals):
                if parameter.is_floating_point():
                    self.elsewhere.watch(index, self.placed[index].name, parameter)

    def release(self, flat: Tensor) -> None:
        """Make the parameters whole again, with memory of their own: the end of sharding."""
        for parameter, view in zip(self.originals, self.layout.views(flat), strict=True):
            parameter.data = view.clone()
            parameter.grad = None
            delattr(parameter, _MARK)
        self.elsewhere.stop()

    @contextmanager
    def gathered(self, purpose: str) -> Iterator[Tensor]:
        """All parameters end to end [N] in their own dtype, to be read and copied within this context; a collective."""
        self._reattach()
        pending = self._comms.gathers.all_gather_on_node(self.shard, sizes=self.layout.sizes, label=f"{self.label} ({purpose})")
        buffer = self._comms.wait(pending, f"gather {self.label}")
        try:
            yield buffer.tensor
        finally:
            buffer.release()

    # --- gathering

    def start_gather(self, *, for_backward: bool) -> Gathering:
        """Start filling the full buffer; for backward from the neighbours, if they hold secondary shards.

        If the shard changes while it is gathered, the full buffer may be stale (`is_fresh`), but never undefined: each rank's part
        is its shard as it was at some time, or a torn mixture of old and new, which counts as stale.
        """
        self._reattach()
        self._gathered = self._versions_now()
        if isinstance(self._full, WholeShard):
            return Pending.done_with(self.shard, f"all_gather of {self.label}")
        secondary = for_backward and self._secondary is not None and self._secondary.held
        on_gpu = is_on_gpu(self._full.tensor)
        if self._comms.gathers.shares_node and self._compressed_gather is None and not secondary and not on_gpu:
            own = self.shard.to(self._dtypes.compute)
            self._arriving = self._comms.gathers.all_gather_on_node(own, sizes=self.layout.sizes, label=self.label)
            self._full.expect()
            return self._arriving
        self._full.allocate()
        try:
            full = self._full.alias()
            if secondary and self._secondary is not None:
                return self._secondary.start_gather(full, self.label)
            if self._compressed_gather is not None:
                return self._compressed_gather.start(self.shard.to(full.device), self.label)
            if on_gpu and self._comms.shard_count > 1:
                return self._start_gather_ahead(full)
            own = self.layout.shard(full, self._comms.shard_rank)
            own.copy_(self.shard)
            if self._comms.shard_count == 1:
                return Pending.done_with(full, f"cast of {self.label}")
            return self._comms.gathers.all_gather(own, sizes=self.layout.sizes, out=full, label=self.label)
        except BaseException:
            self.free()
            raise

    def _start_gather_ahead(self, full: Tensor) -> Gathering:
        """See [Note: gathers ahead]."""
        with self._comms.shards.reading(self.shard.device) as reading:
            own = self.shard.to(self._dtypes.compute)
        return self._comms.gathers.all_gather(own, sizes=self.layout.sizes, out=full, after=reading.done, label=self.label)

    def finish_gather(self) -> None:
        """Complete the full buffer, after the handle from `start_gather` has succeeded. A second call does nothing."""
        if isinstance(self._full, WholeShard):
            return
        if self._compressed_gather is not None:
            self._compressed_gather.finish(self._full.alias())
        self._full.reveal()
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self._full.adopt(arriving.wait())

    def is_fresh(self) -> bool:
        """Whether this rank's part of the full buffer is, bit for bit, what a gather would bring now. Needs a finished gather."""
        self._reattach()
        gathered = self.layout.shard(self._full.tensor.detach(), self._comms.shard_rank)
        if self._compressed_gather is None:
            now = self.shard.to(gathered.device, gathered.dtype)
        else:
            now = self._compressed_gather.received(self.shard.to(gathered.device), gathered.dtype)
        if not torch.equal(gathered.view(torch.uint8), now.view(torch.uint8)):
            return False
        self._gathered = self._versions_now()
        return True

    def check_fresh(self) -> None:
        """Raise StateError if parameters were written to since the gather began to read them. See [Note: writes that would be lost]."""
        if isinstance(self._full, WholeShard):
            self._reattach()
            return
        addresses = [parameter.data_ptr() for parameter in self.originals]
        if self._versions_now() == self._gathered and addresses == [piece.data_ptr() for piece in self._slices]:
            return
        for entry, piece, gathered in zip(self.placed, self._slices, self._gathered, strict=True):
            if entry.parameter._version != gathered or (piece.numel() and entry.parameter.data_ptr() != piece.data_ptr()):
                raise StateError(
                    f"{entry.name} was written to in a forward that had already begun to gather it for {self.label}, which would compute "
                    "with the old values: write to it before the forward or after the optimizer's step, or shard with prefetch=0"
                )

    def _versions_now(self) -> list[int]:
        return [parameter._version for parameter in self.originals]

    def keep_secondary(self) -> None:
        """Keep a secondary shard of the full buffer, which must be complete, for backward, if the model uses secondary shards."""
        if self._secondary is not None:
            self._secondary.take(self._full.tensor.detach())

    def drop_secondary(self) -> None:
        if self._secondary is not None:
            self._secondary.drop()

    def show_full(self) -> None:
        """Put the gathered parameters into the modules. See [Note: parameters that change]."""
        for index, (entry, leaf) in enumerate(zip(self.placed, self.leaves, strict=True)):
            if self._versions[index] != entry.parameter._version:
                self._versions[index] = entry.parameter._version
                increment_version(leaf)
            if leaf.requires_grad != entry.parameter.requires_grad:
                leaf.requires_grad_(entry.parameter.requires_grad)
            if leaf.requires_grad and index not in self._watched:
                self._watch(index)
            self._shown[index] = leaf._version
            for slot in entry.slots:
                slot.put(leaf)

    def freeze_leaves(self) -> None:
        """Until they are shown again no graph is built on the leaves; graphs that exist still bring gradients to them."""
        for leaf in self.leaves:
            leaf.requires_grad_(False)

    def show_shard(self) -> None:
        """Put the original parameters back into the modules."""
        for entry in self.placed:
            for slot in entry.slots:
                slot.put(entry.parameter)

    def written(self) -> str | None:
        """The name of a parameter that was written to since it was shown, if that write will be lost. Leaves that were given other memory
        return to the full buffer. See [Note: writes that would be lost]."""
        start, is_lost, found = self._full.tensor.data_ptr(), not self.computes_with_shard, None
        for index, (leaf, place, shown) in enumerate(zip(self.leaves, self._places, self._shown, strict=True)):
            replaced = place is not None and (leaf.data_ptr() - start, leaf.numel()) != place
            if replaced and not is_lost:
                self._views[index].copy_(leaf.detach())
            elif is_lost and (replaced or leaf._version != shown):
                found = self.placed[index].name
            if replaced:
                leaf.data = self._views[index]
        return found

    def free(self, *, keep_memory: bool = True) -> None:
        """Free the full buffer, and what a gather brought for it. No gather may be under way. With `keep_memory` the next gathers may reuse
        the memory."""
        if self._compressed_gather is not None:
            self._compressed_gather.drop()
        arriving, self._arriving = self._arriving, None
        if arriving is not None and arriving.exception() is None:
            arriving.wait().release()
        self._full.free(keep_memory=keep_memory)

    # --- gradients

    @property
    def reduction_label(self) -> str:
        """Names its reductions in errors and statistics; different on ranks that compress differently."""
        return self.label if self.compressed_reduction is None else f"{self.label} as {self.compressed_reduction.codec}"

    def keep_gradients(self) -> None:
        """Keep the gradients of a backward that has ended without reducing them, until a later one reduces them."""
        self.gradients.outlive_backward()
        self._owed = self._owed.union(self.trainable)

    def drop_gradients(self) -> None:
        """Forget gradients that no reduction has taken, and what compression would add to them."""
        self.gradients.clear()
        self._owed = frozenset()
        self.elsewhere.forget()
        for leaf in self.leaves:
            leaf.grad = None
        if self.compressed_reduction is not None:
            self.compressed_reduction.residual.clear()

    def on_gradient(self, callback: OnGradient, from_elsewhere: OnGradient) -> None:
        """Call `callback(group, index)` whenever a leaf's gradient was put into `gradients`, and `from_elsewhere(group, index)` whenever
        one of [Note: gradients from elsewhere] was."""
        self._on_gradient, self._on_gradient_from_elsewhere = callback, from_elsewhere

    def place_for_gradient(self, dtype: torch.dtype) -> Tensor | None:
        """Memory [shard] for a reduced gradient that must be on another device than the full one; otherwise None."""
        return torch.empty_like(self.shard, dtype=dtype) if self._offloads else None

    def accept(self, shard_gradient: Tensor) -> None:
        """Set, or add to, the gradients of this rank's parameters, in their dtype: of those that are trainable, or were when the gradients
        came. The group then owns `shard_gradient` [shard].

        Calls the parameters' gradient hooks as autograd would, with the reduced gradients of this rank's slices.
        """
        pieces = self.layout.shard_views(shard_gradient.to(self.shard.device, self._dtypes.master), self._comms.shard_rank)
        for index, (parameter, piece) in enumerate(zip(self.originals, pieces, strict=True)):
            if parameter.requires_grad or index in self._owed:
                _accumulate(parameter, piece, is_hooked=self.elsewhere.take_hooked(index))
        self._owed = frozenset()

    def _watch(self, index: int) -> None:
        # The leaf keeps its hook where Python's cycle collector does not look: a hook that held the group would keep it alive for ever.
        reference = weakref.ref(self)

        def collect(leaf: Tensor) -> None:
            group = reference()
            if group is None or leaf.grad is None:  # the model is gone, or the leaf was frozen after forward
                return
            group.gradients.add(index, leaf.grad)
            leaf.grad = None
            group.elsewhere.note_forward(index)
            group._on_gradient(group, index)

        self.leaves[index].register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        self._watched.add(index)

    @property
    def is_known_to_autograd(self) -> bool:
        """Whether `show_full` has nothing to change about leaves."""
        leaves = zip(self.leaves, self.originals, strict=True)
        return self._watched.issuperset(self.trainable) and all(leaf.requires_grad == each.requires_grad for leaf, each in leaves)

    def _take_from_elsewhere(self, index: int, gradient: Tensor) -> None:
        leaf = self.leaves[index]
        self.gradients.add(index, gradient.to(leaf.dtype).view(leaf.shape))
        self._on_gradient_from_elsewhere(self, index)

    def _reattach(self) -> None:
        """Copy parameters back into the shard whose `.data` was set to other memory, as vector_to_parameters and weight averaging do."""
        for entry, piece in zip(self.placed, self._slices, strict=True):
            parameter = entry.parameter
            if parameter.shape != piece.shape:
                raise SizeMismatchError(tuple(piece.shape), tuple(parameter.shape), f"as the shape of this rank's slice of {entry.name}")
            if parameter.dtype != piece.dtype or parameter.device != piece.device:
                raise UsageError(
                    f"{entry.name} became {parameter.dtype} on {parameter.device} after it was sharded: convert or move the module before "
                    "you shard it"
                )
            if piece.numel() and parameter.data_ptr() != piece.data_ptr():
                piece.copy_(parameter.detach())
                parameter.data = piece
                self._comms.shards.changed()


@torch.no_grad()
def _accumulate(parameter: nn.Parameter, gradient: Tensor, *, is_hooked: bool) -> None:
    for hook in () if is_hooked else _hooks(parameter._backward_hooks):
        replaced = hook(gradient)
        gradient = gradient if replaced is None else replaced
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
    for hook in _hooks(parameter._post_accumulate_grad_hooks):
        hook(parameter)


def _hooks(registered: dict[int, Callable[[Tensor], Any]] | None) -> list[Callable[[Tensor], Any]]:
    return list(registered.values()) if registered else []  # one may remove itself
