"""`FlatGroup`: parameters that are gathered and reduced together, as one flat buffer.

[Note: two sets of parameters] The parameters that the module was made with stay its parameters for ever. Each is 1-D
and views this rank's slice of it, possibly empty, in the group's shard: optimizers, `clip_grad_norm_` and whoever else
kept a reference see these. While a unit computes, its modules hold other tensors in their places: leaves in the full
shape that view the full buffer. Autograd puts their gradients on the leaves, from where they are collected.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from shardnet.backend import Pending
from shardnet.errors import SizeMismatchError, UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.full_buffer import FullBuffer, WholeShard
from shardnet.fsdp.gradients import GradientBuffer
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.placement import PlacedParameter
from shardnet.fsdp.pool import BufferPool
from shardnet.sharding import FlatLayout

Tensor = torch.Tensor
OnGradient = Callable[["FlatGroup", int], None]
_MARK = "_shardnet_unit"  # attribute of a parameter that is sharded: the label of its group


def sharded_by(parameter: nn.Parameter) -> str | None:
    """The group whose slice this parameter is; None for one that is whole."""
    return getattr(parameter, _MARK, None)


class FlatGroup:
    """Parameters of one unit, dtype, device and `requires_grad`; lives as long as the wrapped model.

    See [Note: two sets of parameters] and [Note: flat layout].
    """

    def __init__(self, label: str, placed: Sequence[PlacedParameter], comms: Communicators, meter: MemoryMeter, pool: BufferPool) -> None:
        self.label = label  # equal on all ranks: names the collectives
        self.placed = tuple(placed)
        self.originals = tuple(entry.parameter for entry in placed)
        self._comms = comms
        dtype, device = self.originals[0].dtype, self.originals[0].device
        self.layout = FlatLayout([(entry.name, entry.parameter.shape) for entry in placed], comms.shard_count)
        self.shard = torch.empty(self.layout.sizes[comms.shard_rank], dtype=dtype, device=device)  # 1-D, this rank's part
        self._slices = self.layout.shard_views(self.shard, comms.shard_rank)
        self._full: FullBuffer | WholeShard
        if comms.shard_count == 1:
            self._full = WholeShard(self.shard)
        else:
            self._full = FullBuffer(self.layout.numel, dtype, device, owner=label, gauge=meter.full_parameters, pool=pool)
        self.leaves = [nn.Parameter(view, requires_grad=False) for view in self.layout.views(self._full.tensor)]
        self._full.free()
        self.gradients = GradientBuffer(self.layout, dtype, device, gauge=meter.full_gradients, pool=pool)
        self._on_gradient: OnGradient = lambda group, index: None
        self._watched: set[int] = set()  # leaves with a gradient hook

    # --- content

    @property
    def trainable(self) -> list[int]:
        """Indices of the parameters that get gradients; follows `requires_grad_` calls made after wrapping."""
        return [index for index, parameter in enumerate(self.originals) if parameter.requires_grad]

    @property
    def full_bytes(self) -> int:
        return self.layout.numel * self.shard.element_size()

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

    def release(self, flat: Tensor) -> None:
        """Make the parameters whole again, with memory of their own: the end of sharding."""
        for parameter, view in zip(self.originals, self.layout.views(flat), strict=True):
            parameter.data = view.clone()
            parameter.grad = None
            delattr(parameter, _MARK)

    def gather_copy(self, purpose: str) -> Tensor:
        """All parameters end to end [N], in new memory; a collective."""
        self._reattach()
        pending = self._comms.gathers.all_gather(self.shard, sizes=self.layout.sizes, label=f"{self.label} ({purpose})")
        return self._comms.wait(pending, f"gather {self.label}")

    # --- gathering

    def start_gather(self) -> Pending[Tensor]:
        """Allocate the full buffer and start filling it. The shard may change meanwhile: a copy of it is sent."""
        self._reattach()
        if isinstance(self._full, WholeShard):
            return Pending.done_with(self.shard, f"all_gather of {self.label}")
        self._full.allocate()
        try:
            full = self._full.alias()
            own = self.layout.shard(full, self._comms.shard_rank)
            own.copy_(self.shard)
            return self._comms.gathers.all_gather(own, sizes=self.layout.sizes, out=full, label=self.label)
        except BaseException:
            self._full.free()
            raise

    def is_fresh(self) -> bool:
        """Whether the full buffer holds what the shard holds now, bit for bit, on this rank. Needs a finished gather."""
        self._reattach()
        gathered = self.layout.shard(self._full.tensor.detach(), self._comms.shard_rank)
        return torch.equal(gathered.view(torch.uint8), self.shard.view(torch.uint8))

    def show_full(self) -> None:
        """Put the gathered parameters into the modules."""
        for index, (entry, leaf) in enumerate(zip(self.placed, self.leaves, strict=True)):
            if leaf.requires_grad != entry.parameter.requires_grad:
                leaf.requires_grad_(entry.parameter.requires_grad)
            if leaf.requires_grad and index not in self._watched:
                self._watch(index)
            for slot in entry.slots:
                slot.put(leaf)

    def show_shard(self) -> None:
        """Put the original parameters back into the modules."""
        for entry in self.placed:
            for slot in entry.slots:
                slot.put(entry.parameter)

    def free(self) -> None:
        """Free the full buffer. No gather may be under way."""
        self._full.free()

    # --- gradients

    def on_gradient(self, callback: OnGradient) -> None:
        """Call `callback(group, index)` whenever a leaf has got its gradient and it was put into `gradients`."""
        self._on_gradient = callback

    def accept(self, shard_gradient: Tensor) -> None:
        """Set, or add to, the gradients of this rank's parameters. `shard_gradient` [shard] belongs to the group then."""
        pieces = self.layout.shard_views(shard_gradient, self._comms.shard_rank)
        for parameter, piece in zip(self.originals, pieces, strict=True):
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = piece
            else:
                parameter.grad.add_(piece)

    def _watch(self, index: int) -> None:
        def collect(leaf: Tensor) -> None:
            if leaf.grad is None:
                return  # frozen since forward
            self.gradients.add(index, leaf.grad)
            leaf.grad = None
            self._on_gradient(self, index)

        self.leaves[index].register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        self._watched.add(index)

    def _reattach(self) -> None:
        """Bring parameters back whose `.data` was set to other memory, as vector_to_parameters and weight averaging do."""
        for entry, piece in zip(self.placed, self._slices, strict=True):
            parameter = entry.parameter
            if parameter.shape != piece.shape:
                raise SizeMismatchError(tuple(piece.shape), tuple(parameter.shape), f"as the shape of this rank's slice of {entry.name}")
            if parameter.dtype != piece.dtype or parameter.device != piece.device:
                raise UsageError(
                    f"{entry.name} was moved to {parameter.dtype} on {parameter.device}: convert the module before wrapping it"
                )
            if piece.numel() and parameter.data_ptr() != piece.data_ptr():
                piece.copy_(parameter.detach())
                parameter.data = piece
