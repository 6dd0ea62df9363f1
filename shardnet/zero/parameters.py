"""`ShardedParameters`: all parameters of one optimizer, in buckets, and what this rank owns of them."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardnet.collectives.reduction import dtype_name
from shardnet.errors import DtypeError, UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.group import sharded_by
from shardnet.fsdp.initial import ROOT, copy_buffers_from_root
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.pool import BufferPool
from shardnet.sharding import ParameterSlice
from shardnet.zero.bucket import Bucket, Owned
from shardnet.zero.bucketing import Units, plan_buckets
from shardnet.zero.split import Split

Tensor = torch.Tensor
Named = Sequence[tuple[str, Tensor]]


class ShardedParameters:
    """The buckets and pieces of one optimizer. Grows with the optimizer's groups; lives as long as the optimizer."""

    def __init__(self, units: Units, split: Split, bucket_bytes: int, comms: Communicators) -> None:
        self.buckets: list[Owned] = []  # in the order of the gathers, which is that of the units
        self.pieces: dict[Tensor, nn.Parameter] = {}  # this rank's part of each parameter, where it has one
        self.slices: dict[Tensor, ParameterSlice] = {}  # the same as ranges of elements, possibly empty
        self.memory = MemoryMeter()  # the packed gradients
        self._units = units
        self._split = split
        self._bucket_bytes = bucket_bytes
        self._comms = comms
        self._pool = BufferPool(self.memory)

    def add(self, named: Named) -> None:
        """Move parameters into buckets, with rank 0's values. A collective."""
        held = [sum(bucket.layout.sizes[rank] for _, bucket in self.buckets) for rank in range(self._comms.shard_count)]
        for plan in plan_buckets(named, self._units, self._split, held, self._bucket_bytes):
            bucket = Bucket(plan.label, plan.named, plan.layout, self._comms, self.memory, self._pool)
            self._comms.wait(bucket.copy_from_root(ROOT), f"initial {bucket.label}")
            self.buckets.append((plan.unit, bucket))
            self.pieces |= bucket.make_pieces(whole=self._split is Split.PARAMETERS)
            self.slices |= bucket.slices()
        self.buckets.sort(key=lambda entry: -1 if entry[0] is None else entry[0])

    def copy_rest_from_root(self, module: nn.Module) -> None:
        """Give a module rank 0's buffers, and its parameters that are not optimized. A collective."""
        for name, parameter in module.named_parameters():
            if parameter not in self.slices:
                pending = self._comms.everyone.broadcast(parameter.detach().contiguous(), ROOT, label=f"{name} (initial)")
                with torch.no_grad():
                    parameter.copy_(self._comms.wait(pending, f"initial {name}"))
        copy_buffers_from_root(module, self._comms)

    def reattach(self) -> None:
        """See `Bucket.reattach`."""
        for _, bucket in self.buckets:
            bucket.reattach()

    def having(self, chosen: Mapping[Tensor, bool]) -> list[Owned]:
        """The buckets with any of the chosen parameters."""
        return [entry for entry in self.buckets if any(chosen[parameter] for parameter in entry[1].parameters)]


def check_parameters(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise UsageError for parameters that FSDP has sharded, for lazy ones without a shape, and for complex numbers and integers."""
    for name, parameter in named:
        if is_lazy(parameter):
            raise UsageError(f"{name} is a lazy parameter without a shape: call the module once on an example input before you shard it")
        if (unit := sharded_by(parameter)) is not None:
            raise UsageError(
                f"{name} is sharded already, by FSDP in {unit}, and so is its optimizer state: use the optimizer class itself, without "
                "ZeroOptimizer"
            )
        if parameter.is_complex():
            raise DtypeError(
                f"{name} is {dtype_name(parameter.dtype)}, and complex parameters cannot be sharded: store it as real numbers "
                "(torch.view_as_real), or give it to an optimizer of its own"
            )
        if not parameter.is_floating_point():
            raise DtypeError(
                f"{name} is {dtype_name(parameter.dtype)}, which has no gradient: give the optimizer the other parameters only"
            )
