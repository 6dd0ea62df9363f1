"""`Unit`: a submodule whose parameters are gathered, used and freed together."""

from enum import Enum, auto

import torch
from torch import nn

from shardnet.backend import Pending
from shardnet.errors import ShardnetError
from shardnet.fsdp.communicators import Communicators
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.memory import MemoryMeter
from shardnet.fsdp.placement import PlacedParameter, UnitPlan
from shardnet.fsdp.pool import BufferPool


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

    def __init__(self, plan: UnitPlan, comms: Communicators, meter: MemoryMeter, pool: BufferPool) -> None:
        self.name = plan.name
        self.module: nn.Module = plan.module
        self.groups = _make_groups(plan, comms, meter, pool)
        self.state = UnitState.SHARDED
        self._comms = comms
        self._pending: list[Pending[torch.Tensor]] = []

    def __repr__(self) -> str:
        return f"<Unit {self.name} {self.state.name}>"

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters gets gradients."""
        return any(group.trainable for group in self.groups)

    @property
    def frozen_in_part(self) -> bool:
        """Whether any of its parameters gets none."""
        return any(len(group.trainable) < len(group.originals) for group in self.groups)

    def start_gather(self) -> list[Pending[torch.Tensor]]:
        """SHARDED → GATHERING. The handles are the unit's own to wait for; others may look."""
        assert self.state is UnitState.SHARDED, self
        self.state = UnitState.GATHERING
        for group in self.groups:
            self._pending.append(group.start_gather())
        return list(self._pending)

    def wait_gathered(self) -> None:
        """Block until the full buffers are complete. Still GATHERING, but readable; on an error back to SHARDED."""
        assert self.state is UnitState.GATHERING, self
        try:
            for pending in self._pending:
                self._comms.wait(pending, f"gather {self.name}")
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

    def reshard(self) -> None:
        """FORWARD, BACKWARD or HELD → SHARDED."""
        assert self.state not in (UnitState.SHARDED, UnitState.GATHERING), self
        for group in self.groups:
            group.show_shard()
            group.free()
        self.state = UnitState.SHARDED

    def hold(self) -> None:
        """FORWARD → HELD."""
        assert self.state is UnitState.FORWARD, self
        for group in self.groups:
            group.show_shard()
        self.state = UnitState.HELD

    def discard(self) -> None:
        """GATHERING → SHARDED, whatever became of the gather: memory that is still written to is not freed."""
        assert self.state is UnitState.GATHERING, self
        for pending in self._pending:
            pending.exception()
        self._pending.clear()
        for group in self.groups:
            group.free()
        self.state = UnitState.SHARDED

    def drop_gradients(self) -> None:
        """Forget gradients that no reduction has taken, after an error."""
        for group in self.groups:
            group.gradients.clear()
            for leaf in group.leaves:
                leaf.grad = None


def _make_groups(plan: UnitPlan, comms: Communicators, meter: MemoryMeter, pool: BufferPool) -> list[FlatGroup]:
    """One group per dtype, device and requires_grad; normally that is one."""
    kinds: dict[tuple[torch.dtype, torch.device, bool], list[PlacedParameter]] = {}
    for placed in plan.parameters:
        parameter = placed.parameter
        kinds.setdefault((parameter.dtype, parameter.device, parameter.requires_grad), []).append(placed)
    return [FlatGroup(_label(plan.name, *kind, alone=len(kinds) == 1), members, comms, meter, pool) for kind, members in kinds.items()]


def _label(name: str, dtype: torch.dtype, device: torch.device, trainable: bool, *, alone: bool) -> str:
    return name if alone else f"{name}[{str(dtype).removeprefix('torch.')}, {device.type}, {'trainable' if trainable else 'frozen'}]"
