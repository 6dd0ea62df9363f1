"""Parameters and buffers by name: whole, as one process would save them, or this rank's slices.

The whole ones have the names, shapes and order of the inner module's own state_dict, tied names included, so they can
be loaded into it, and into a wrapped model of any world size.

[Note: hooks of state dicts] Modules may change what their state_dict holds, and what they load: torch's checkpoint_wrapper takes its own
name out of the names, other hooks split a parameter or add what they compute of it. So a name in a state_dict says nothing about which
parameter it is. For a whole state the modules hold whole parameters while their hooks run; a name without its tensor is found by the
tensor's identity; and loading cuts what is still whole when all hooks of a module have run.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardnet.errors import SizeMismatchError, StateError, UsageError
from shardnet.fsdp.group import FlatGroup
from shardnet.fsdp.placement import PlacedParameter, Slot
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
            f"the state_dict() of a sharded {type(module).__name__} would hold this rank's slices, or the copies that forward computes "
            "with: call full_state_dict() of the FSDP model, on all ranks; a library that saves modules may accept the result, as "
            "save_pretrained(folder, state_dict=...) does"
        )


def refuse_wholes(module: nn.Module, *_: object) -> None:
    """A hook before the inner module's own load_state_dict(): that one would find that whole parameters do not fit into slices."""
    if not _slices_wanted.get():
        raise StateError(
            f"load_state_dict() of a sharded {type(module).__name__} cannot put whole parameters into this rank's slices: call "
            "load_state_dict() of the FSDP model, on all ranks"
        )


@contextmanager
def _as_slices() -> Iterator[None]:
    """Let a module's own state_dict() and load_state_dict() be called, for slices."""
    token = _slices_wanted.set(True)
    try:
        yield
    finally:
        _slices_wanted.reset(token)


def full_state(module: nn.Module, groups: Sequence[FlatGroup], *, keep: bool) -> dict[str, Any]:
    """Every parameter whole, in memory of its own, gathered group by group; {} where `keep` is false. A collective.

    Raises StateError for an entry that is a slice all the same, because the module has kept the parameter in a place of its own.
    """
    wholes: dict[PlacedParameter, Tensor] = {}
    for group in groups:
        with group.gathered("state") as flat:
            if keep:
                wholes |= {placed: view.clone() for placed, view in zip(group.placed, group.layout.views(flat), strict=True)}
    if not keep:
        return {}
    with _showing(module, groups, wholes):  # see [Note: hooks of state dicts]
        state = with_slices(module)
    memories = {whole.untyped_storage().data_ptr(): whole for whole in wholes.values() if whole.numel()}
    shards = {group.shard.untyped_storage().data_ptr() for group in groups if group.shard.numel()}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        memory = value.untyped_storage().data_ptr() if type(value) is Tensor and value.layout is torch.strided and value.numel() else 0
        if memory in shards:
            raise StateError(
                f"{name} in the state_dict() of the sharded {type(module).__name__} is this rank's slice, not the whole parameter: a "
                "module has added it from a reference of its own. Have that module's state_dict() read its registered parameters, as "
                "torch's does"
            )
        whole = memories.get(memory)
        if whole is None:
            state[name] = value.clone()
        elif value.shape == whole.shape and value.stride() == whole.stride():
            state[name] = whole  # the same tensor under each name of a tied parameter
    return state


def sharded_state(module: nn.Module, groups: Sequence[FlatGroup], rank: int) -> ShardedState:
    """This rank's slices; no traffic."""
    sharded = sharded_names(module, groups)
    rest = {name: value for name, value in with_slices(module).items() if name not in sharded}
    return ShardedState(
        rank=rank,
        world_size=groups[0].layout.world_size if groups else 1,
        slices={piece.name: piece for group in groups for piece in group.layout.slices(rank)},
        shards={placed.name: placed.parameter.detach().clone() for group in groups for placed in group.placed},
        rest={name: value.clone() if isinstance(value, Tensor) else value for name, value in rest.items()},
    )


def load_full_state(module: nn.Module, groups: Sequence[FlatGroup], rank: int, state: FullState, *, strict: bool) -> Any:
    """Take this rank's slices out of whole parameters; no traffic. Returns what nn.Module.load_state_dict returns.

    A tensor under the name that a parameter has in the module's state_dict is cut when it is read. Any other stays whole until the module's
    hooks have made parameters of it: see [Note: hooks of state dicts].
    """
    if state is None:
        raise UsageError("the state to load is None: give every rank the full state dict, read from a file or gathered without rank0_only")
    slices = {placed: piece for group in groups for placed, piece in zip(group.placed, group.layout.slices(rank), strict=True)}
    pieces = {name: slices[placed] for name, placed in sharded_names(module, groups).items()}
    local: OrderedDict[str, Any] = OrderedDict()
    if hasattr(state, "_metadata"):
        local._metadata = state._metadata  # type: ignore[attr-defined]
    for name, whole in ((name, state[name]) for name in state) if isinstance(state, Mapping) else state:
        # a copy of the slice, so that nothing keeps the whole, not even until the next one is read
        local[name] = _cut(name, whole, pieces[name]).clone() if name in pieces and isinstance(whole, Tensor) else whole
        del whole
    with _as_slices(), _cutting(module, groups, slices):
        return module.load_state_dict(local, strict=strict)


def load_sharded_state(module: nn.Module, groups: Sequence[FlatGroup], rank: int, state: ShardedState) -> None:
    """Take back what `sharded_state` returned on this rank, in a world of the same size; no traffic."""
    slices = {piece.name: piece for group in groups for piece in group.layout.slices(rank)}
    if slices != state.slices:
        raise UsageError(
            f"the shards were saved by rank {state.rank} of {state.world_size}, whose slices differ from those of rank {rank} here; "
            "load a full state dict instead"
        )
    with torch.no_grad():
        for group in groups:
            for placed in group.placed:
                placed.parameter.copy_(state.shards[placed.name])
    with _as_slices():
        module.load_state_dict(state.rest, strict=False)


def with_slices(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The module's own state_dict, in which sharded parameters are this rank's slices, or whole ones while their unit is gathered;
    `keep_vars` as for torch, whose own method is called then."""
    with _as_slices():
        if not keep_vars:
            return module.state_dict()  # a method of the module's own need not take any argument
        return nn.Module.state_dict(module, keep_vars=True)


def sharded_names(module: nn.Module, groups: Sequence[FlatGroup]) -> dict[str, PlacedParameter]:
    """The sharded parameters by their names in the module's state_dict, whether modules hold slices or gathered parameters. Those that a
    hook has replaced by something else are not among them."""
    held = _held(groups)
    named = with_slices(module, keep_vars=True)
    return {name: held[tensor] for name, tensor in named.items() if isinstance(tensor, Tensor) and tensor in held}


def _held(groups: Sequence[FlatGroup]) -> dict[Tensor, PlacedParameter]:
    """The sharded parameters by what modules may hold of them: slices, or what is in their place while a unit is gathered."""
    return {
        tensor: placed
        for group in groups
        for placed, leaf in zip(group.placed, group.leaves, strict=True)
        for tensor in (placed.parameter, leaf)
    }


def _places(module: nn.Module, groups: Sequence[FlatGroup]) -> list[tuple[Slot, nn.Parameter, PlacedParameter]]:
    """Every place that holds a sharded parameter now, and what it holds; a program may have moved some, as pruning does."""
    known = _held(groups)
    return [
        (Slot(part, attribute), held, known[held])
        for part in module.modules()
        for attribute, held in part._parameters.items()
        if held is not None and held in known
    ]


@contextmanager
def _showing(module: nn.Module, groups: Sequence[FlatGroup], wholes: Mapping[PlacedParameter, Tensor]) -> Iterator[None]:
    """Have the modules hold these parameters for a while, in place of slices or of what their units gathered."""
    shown = {placed: nn.Parameter(whole, requires_grad=placed.parameter.requires_grad) for placed, whole in wholes.items()}
    with ExitStack() as restored:
        for slot, held, placed in _places(module, groups):
            restored.callback(slot.put, held)
            slot.put(shown[placed])
        yield


@contextmanager
def _cutting(module: nn.Module, groups: Sequence[FlatGroup], pieces: Mapping[PlacedParameter, ParameterSlice]) -> Iterator[None]:
    """Cut whole parameters that modules are about to load. Hooks of a module run in the order in which they were registered, these last."""

    def cut(part: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for attribute, piece in wanted[part].items():
            value = state.get(prefix + attribute)
            if isinstance(value, Tensor) and tuple(value.shape) == piece.shape:
                state[prefix + attribute] = _cut(prefix + attribute, value, piece)

    wanted: dict[nn.Module, dict[str, ParameterSlice]] = {}
    for slot, _, placed in _places(module, groups):
        wanted.setdefault(slot.module, {})[slot.attribute] = pieces[placed]
    with ExitStack() as registered:
        for part in wanted:
            registered.callback(part.register_load_state_dict_pre_hook(cut).remove)  # type: ignore[no-untyped-call]  # torch has no annotation for it
        yield


def _cut(name: str, whole: Tensor, piece: ParameterSlice) -> Tensor:
    if tuple(whole.shape) != piece.shape:
        raise SizeMismatchError(piece.shape, tuple(whole.shape), f"as the shape of {name}")
    return whole.detach().reshape(-1)[piece.start : piece.stop]
