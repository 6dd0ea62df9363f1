"""`WholeUnit`: the memory of one unit while its parameters get their first values."""

from collections.abc import Mapping
from math import nan

import torch
from torch import nn

from shardnet.errors import SizeMismatchError, UsageError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.initial import spread_from_root
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.meta.initial_values import InitialValues, listed
from shardnet.fsdp.placement import PlacedParameter
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.unit import Unit

Tensor = torch.Tensor


class WholeUnit:
    """Flat buffers [N] that the parameters of a unit view, each in its shape, until the unit is sharded.

    [Note: unfilled] Memory is handed out full of NaN, so that what nobody has filled can be named. Integers and booleans have
    no such value: theirs are zeros, and are not checked.
    """

    def __init__(self, unit: Unit, comms: Communicators, meter: MemoryMeter, pool: BufferPool) -> None:
        self._unit = unit
        self._comms = comms
        self._gauge = meter.full_parameters
        self._pool = pool
        self._flats = [self._allocate(group.layout.numel, group.shard) for group in unit.groups]
        for placed, view in self._views():
            placed.parameter.data = view

    def shard(self, values: InitialValues, shades: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Complete the parameters, send rank 0's to all ranks, and keep only this rank's part. A collective.

        The modules are left with the `shades` of the parameters.

        Raises UsageError for parameters that nobody has filled, and on all ranks for a state that does not fit.
        """
        with values.agreed(self._unit.name, self._comms):
            self._complete(values)
        for placed, _ in self._views():
            for slot in placed.slots:
                slot.put(shades[placed.parameter])
        for group, flat in zip(self._unit.groups, self._flats, strict=True):
            spread_from_root(group, flat, self._comms)
            self._gauge.remove(flat.nbytes)
            self._pool.give(flat.untyped_storage())
        self._flats.clear()

    def _complete(self, values: InitialValues) -> None:
        for placed, view in self._views():
            _take_back(placed, view)
            values.load_parameter(placed, view)
        if values.filled_here:
            unfilled = [placed.name for placed, view in self._views() if view.is_floating_point() and bool(view.isnan().any())]
            if unfilled:
                raise UsageError(f"{listed(unfilled)}: not filled by initialisation, or filled with NaN; {values.advice}")

    def _views(self) -> list[tuple[PlacedParameter, Tensor]]:
        return [
            pair
            for group, flat in zip(self._unit.groups, self._flats, strict=True)
            for pair in zip(group.placed, group.layout.views(flat), strict=True)
        ]

    def _allocate(self, numel: int, like: Tensor) -> Tensor:
        memory = self._pool.take(numel * like.itemsize, like.device)
        flat = torch.empty(0, dtype=like.dtype, device=like.device).set_(memory, 0, (numel,), (1,))
        self._gauge.add(flat.nbytes)
        return flat.fill_(nan if flat.is_floating_point() else 0)


def _take_back(placed: PlacedParameter, view: Tensor) -> None:
    """Copy what an init function has put elsewhere: into other memory, or into a parameter of its own, as `to_empty` does."""
    slot = placed.slots[0]
    current = slot.module._parameters[slot.attribute]
    if not isinstance(current, nn.Parameter) or current.shape != view.shape:
        raise SizeMismatchError(tuple(view.shape), None if current is None else tuple(current.shape), f"as the shape of {placed.name}")
    if current.device != view.device or current.data_ptr() != view.data_ptr():
        view.copy_(current)
