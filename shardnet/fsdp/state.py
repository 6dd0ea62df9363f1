"""Parameters and buffers by name: whole, as one process would save them, or this rank's slices.

The whole ones have the names, shapes and order of the inner module's own state_dict, tied names included, so they can
be loaded into it, and into a wrapped model of any world size.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardnet.errors import SizeMismatchError, StateError, UsageError
from shardnet.fsdp.group import FlatGroup
from shardnet.sharding import ParameterSlice

Tensor = torch.Tensor
FullState = Mapping[str, Any] | Iterable[tuple[str, Any]]
_slices_wanted = ContextVar("slices_wanted", default=False)


@dataclass(frozen=True)
class ShardedState:
    """What one rank holds, by the first name of each parameter. The tensors are copies."""

    rank: int
    world_size: int
    slices: dict[str, ParameterSlice]  # which elements of the flattened parameter
    shards: dict[str, Tensor]  # 1-D, those elements
    rest: dict[str, Any]  # what is not sharded: buffers and extra state


def refuse_slices(module: nn.Module, *_: object) -> None:
    """A hook before the inner module's own state_dict(): that one holds slices in place of parameters, and nobody should save them as whole
    parameters."""
    if not _slices_wanted.get():
        raise StateError(
            f"the state_dict() of a sharded {type(module).__name__} would hold this rank's slices, or what forward computes with: take "
            "full_state_dict() of the FSDP model, on all ranks; what saves a module by itself may accept it, as "
            "save_pretrained(folder, state_dict=...) does"
        )


def full_state(module: nn.Module, groups: Sequence[FlatGroup], *, keep: bool) -> dict[str, Any]:
    """Every parameter whole, in memory of its own, group by group; {} where `keep` is false. A collective."""
    state = with_slices(module) if keep else {}
    for group in groups:
        with group.gathered("state") as flat:
            for placed, view in zip(group.placed, group.layout.views(flat), strict=True) if keep else ():
                whole = view.clone()
                state.update((name, whole) for name in placed.names if name in state)
    sharded = {name for group in groups for placed in group.placed for name in placed.names}
    return _with_copies(state, {name for name in state if name not in sharded})


def sharded_state(module: nn.Module, groups: Sequence[FlatGroup], rank: int) -> ShardedState:
    """This rank's slices; no traffic."""
    names = {name for group in groups for placed in group.placed for name in placed.names}
    rest = {name: value for name, value in with_slices(module).items() if name not in names}
    return ShardedState(
        rank=rank,
        world_size=groups[0].layout.world_size if groups else 1,
        slices={piece.name: piece for group in groups for piece in group.layout.slices(rank)},
        shards={placed.name: placed.parameter.detach().clone() for group in groups for placed in group.placed},
        rest=_with_copies(rest, set(rest)),
    )


def load_full_state(module: nn.Module, groups: Sequence[FlatGroup], rank: int, state: FullState, *, strict: bool) -> Any:
    """Take this rank's slices out of whole parameters, one at a time; no traffic. Returns what nn.Module.load_state_dict returns."""
    if state is None:
        raise UsageError("there is no state to load: every rank must be given all of it, from a file or gathered without rank0_only")
    pieces = {
        name: piece
        for group in groups
        for placed, piece in zip(group.placed, group.layout.slices(rank), strict=True)
        for name in placed.names
    }
    local: OrderedDict[str, Any] = OrderedDict()
    if hasattr(state, "_metadata"):
        local._metadata = state._metadata  # type: ignore[attr-defined]
    for name, whole in ((name, state[name]) for name in state) if isinstance(state, Mapping) else state:
        # a copy of the slice, so that nothing keeps the whole, not even until the next one is read
        local[name] = _cut(name, whole, pieces[name]).clone() if name in pieces else whole
        del whole
    return module.load_state_dict(local, strict=strict)


def load_sharded_state(module: nn.Module, groups: Sequence[FlatGroup], rank: int, state: ShardedState) -> None:
    """Take back what `sharded_state` returned on this rank, in a world of the same size; no traffic."""
    slices = {piece.name: piece for group in groups for piece in group.layout.slices(rank)}
    if slices != state.slices:
        raise UsageError(
            f"the shards were saved by rank {state.rank} of {state.world_size} with other slices than rank {rank} holds here; "
            "load the full state instead"
        )
    with torch.no_grad():
        for group in groups:
            for placed in group.placed:
                placed.parameter.copy_(state.shards[placed.name])
    module.load_state_dict(state.rest, strict=False)


def with_slices(module: nn.Module) -> dict[str, Any]:
    """The module's own state_dict, in which sharded parameters are this rank's slices."""
    token = _slices_wanted.set(True)
    try:
        return module.state_dict()
    finally:
        _slices_wanted.reset(token)


def _cut(name: str, whole: Tensor, piece: ParameterSlice) -> Tensor:
    if tuple(whole.shape) != piece.shape:
        raise SizeMismatchError(piece.shape, tuple(whole.shape), f"as the shape of {name}")
    return whole.detach().reshape(-1)[piece.start : piece.stop]


def _with_copies(state: dict[str, Any], names: set[str]) -> dict[str, Any]:
    for name in names:
        if isinstance(state[name], Tensor):
            state[name] = state[name].clone()
    return state
