"""`Unit`: a submodule whose parameters are gathered, used and freed together."""

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import nn

from shardnet.errors import ShardnetError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.compression import Compression
from shardnet.fsdp.group import FlatGroup, Gathering
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.placement import PlacedParameter, UnitPlan
from shardnet.fsdp.pool import BufferPool
from shardnet.fsdp.precision import Dtypes, MixedPrecision


class UnitState(Enum):
    """Who owns the unit's full buffers, and what may come next."""

    SHARDED = auto()  # the buffers have no memory; modules hold the shards. Next: GATHERING
    GATHERING = auto()  # allocated, owned by the collectives, not readable; modules hold the shards. Next: any other
    FORWARD = auto()  # complete, read by the running forward; modules hold the full parameters. Next: SHARDED or HELD
    HELD = (
        auto()
    )  # complete, kept for the backward that comes next; modules hold the shards. Next: BACKWARD, FORWARD if used again, SHARDED
    BACKWARD = auto()  # complete, read by autograd and recomputation; modules hold the full parameters. Next: SHARDED


class Unit:
    """One wrapped submodule; lives as long as the wrapped model."""

    def __init__(
        self,
        plan: UnitPlan,
        precision: MixedPrecision,
        compression: Compression,
        comms: Communicators,
        meter: MemoryMeter,
        pool: BufferPool,
        compute_device: torch.device | None = None,
    ) -> None:
        self.name = plan.name
        self.module: nn.Module = plan.module
        self.groups = _make_groups(plan, precision, compression, comms, meter, pool, compute_device)
        self.state = UnitState.SHARDED
        self._comms = comms
        self._pending: list[Gathering] = []

    def __repr__(self) -> str:
        return f"<Unit {self.name} {self.state.name}>"

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters gets gradients."""
        return any(group.trainable for group in self.groups)

    @property
    def awaits_reduction(self) -> bool:
        """Whether any of its groups does."""
        return any(group.awaits_reduction for group in self.groups)

    @property
    def is_known_to_autograd(self) -> bool:
        """Whether its parameters have been shown as they are, so that nothing about them has to be changed to show them again."""
        return all(group.is_known_to_autograd for group in self.groups)

    @property
    def frozen_in_part(self) -> bool:
        """Whether any of its parameters gets none."""
        return any(len(group.trainable) < len(group.originals) for group in self.groups)

    def start_gather(self, *, for_backward: bool = False) -> list[Gathering]:
        """SHARDED → GATHERING. Only the unit waits for the handles; others may look at them."""
        assert self.state is UnitState.SHARDED, self
        self.state = UnitState.GATHERING
        for group in self.groups:
            # quietly: a model that is dropped in the middle of a pass drops what it has begun
            self._pending.append(group.start_gather(for_backward=for_backward).quietly())
        return list(self._pending)

    def wait_gathered(self) -> None:
        """Block until the full buffers are complete. Still GATHERING, but readable; on an error back to SHARDED."""
        assert self.state is UnitState.GATHERING, self
        try:
            for pending in self._pending:
                self._comms.wait(pending, f"gather {self.name}")
            for group in self.groups:
                group.finish_gather()
        except ShardnetError:
            self.discard()
            raise

    def use(self, state: UnitState) -> None:
        """GATHERING or HELD → FORWARD or BACKWARD: wait, and show the full parameters to the modules."""
        if self.state is UnitState.GATHERING:
            self.wait_gathered()
            self._pending.clear()
        for group in self.groups:
            group.show_full()
        self.state = state

    def reshard(self, *, backward_follows: bool = False, keep_memory: bool = True) -> None:
        """FORWARD, BACKWARD or HELD → SHARDED. `backward_follows` keeps a secondary shard, if the model uses them, since backward
        will gather the unit again. `keep_memory` leaves the memory to the units gathered next, if as many will be whole at once
        again."""
        assert self.state not in (UnitState.SHARDED, UnitState.GATHERING), self
        for group in self.groups:
            if backward_follows:
                group.keep_secondary()
            group.show_shard()
            group.free(keep_memory=keep_memory)
        self.state = UnitState.SHARDED

    def check_fresh(self) -> None:
        """Raise StateError if a parameter has changed since the gather, finished or not, began to read it."""
        for group in self.groups:
            group.check_fresh()

    def written(self) -> str | None:
        """The name of a parameter that was written to while it was whole, if that write will be lost; otherwise None. Call it before the
        unit is freed."""
        return next((name for name in [group.written() for group in self.groups] if name is not None), None)

    def drop_secondary(self) -> None:
        """Backward is over, or a forward begins; see [Note: secondary shards]."""
        for group in self.groups:
            group.drop_secondary()

    def hold(self) -> None:
        """FORWARD → HELD."""
        assert self.state is UnitState.FORWARD, self
        for group in self.groups:
            group.show_shard()
        self.state = UnitState.HELD

    def discard(self) -> None:
        """GATHERING → SHARDED, whether the gather succeeds or fails. Waits for it, since memory that is still written to must not be
        freed."""
        assert self.state is UnitState.GATHERING, self
        for pending in self._pending:
            pending.exception()
        self._pending.clear()
        for group in self.groups:
            group.free()
        self.state = UnitState.SHARDED

    def keep_gradients(self) -> None:
        """Keep the gradients of a backward that has ended without reducing them."""
        for group in self.groups:
            group.keep_gradients()

    def drop_gradients(self) -> None:
        """Forget gradients that no reduction has taken, after an error."""
        for group in self.groups:
            group.drop_gradients()


def _make_groups(
    plan: UnitPlan,
    precision: MixedPrecision,
    compression: Compression,
    comms: Communicators,
    meter: MemoryMeter,
    pool: BufferPool,
    compute_device: torch.device | None,
) -> list[FlatGroup]:
    """One group per dtypes, device and requires_grad; normally that is one."""
    kinds: dict[tuple[Dtypes, torch.device, bool], list[PlacedParameter]] = {}
    for placed in plan.parameters:
        parameter = placed.parameter
        dtypes = compression.dtypes(precision.dtypes(placed.name, parameter))
        kinds.setdefault((dtypes, parameter.device, parameter.requires_grad), []).append(placed)
    labels = _labels(plan.name, list(kinds))
    return [
        FlatGroup(label, members, kind[0], compression, comms, meter, pool, compute_device)
        for label, (kind, members) in zip(labels, kinds.items(), strict=True)
    ]


def _labels(name: str, kinds: Sequence[tuple[Dtypes, torch.device, bool]]) -> list[str]:
    """Names that tell the groups of one unit apart."""
    if len(kinds) == 1:
        return [name]
    return [f"{name}[{dtypes}, {device.type}, {'trainable' if trainable else 'frozen'}]" for dtypes, device, trainable in kinds]
