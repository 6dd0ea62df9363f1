"""The things that a training has besides sharded models, what must be kept of each, and which part is made of which thing."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, AsyncFSDP
from shardnet.fsdp.group import sharded_by
from shardnet.fsdp.state import with_slices
from shardnet.state.model_part import ModelPart
from shardnet.state.modules import check_extra_state, check_whole, extra_state, load_extra_state, take_back
from shardnet.state.part import Part, Whole, detached, named_tensors, own_state, span_of, spans_of
from shardnet.state.piece import VALUES, Piece, Span
from shardnet.zero import ZeroOptimizer
from shardnet.zero.pieces import all_slices, named_parameters, owned, replace_owned

Tensor = torch.Tensor
_PARAMETERS = ("params", "param_names")  # of a group's options


@runtime_checkable
class Stateful(Protocol):
    """Schedulers, scalers, and whatever else has a small state that is the same on all ranks."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class ZeroPart(Part):
    """A `ZeroOptimizer`, with the parameters that it steps."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self.kind = f"{type(optimizer).__name__} of {optimizer.optimizer_class.__name__}"

    def sizes(self) -> dict[str, int]:
        return {piece.name: torch.Size(piece.shape).numel() for piece in all_slices(self._optimizer)}

    def wanted(self) -> list[Span]:
        return spans_of(all_slices(self._optimizer))

    def spread(self) -> dict[Tensor, Whole]:
        return {parameter: Whole.of(parameter, piece.name, piece.shape) for parameter, piece in named_parameters(self._optimizer).items()}

    def pieces(self) -> Iterator[Piece]:
        for piece, values, state in owned(self._optimizer):
            yield Piece(span_of(piece), {VALUES: values, **state})

    def load(self, pieces: Mapping[str, Piece]) -> None:
        held = {piece.name: values for piece, values, _ in owned(self._optimizer)}
        found = {}
        for name, piece in pieces.items():
            state = dict(piece.state)
            values = state.pop(VALUES)
            found[name] = values, own_state(state, held[name], values.dtype)
        replace_owned(self._optimizer, found)


class ModulePart(Part):
    """A module that every rank has whole, such as a running average of another one, without the parameters that a ZeroPart keeps."""

    kind = "module"

    def __init__(self, module: nn.Module, zeros: Sequence[ZeroOptimizer]) -> None:
        self._module = module
        self._zeros = zeros

    def whole(self) -> dict[str, Tensor]:
        stepped = _parameters(self._zeros)
        own = {name: parameter for name, parameter in self._module.named_parameters() if parameter not in stepped}
        return {**own, **dict(self._module.named_buffers())}

    def named(self) -> dict[str, Tensor | None]:
        return named_tensors(with_slices(self._module, keep_vars=True), _tensors(self._module))

    def rest(self) -> dict[str, Tensor]:
        return detached(self.whole())

    def check(self, kept: Mapping[str, Tensor], state: Any) -> None:
        check_whole(self._module, self.whole(), kept)
        check_extra_state(self._module, state or {})

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        take_back(self._module, self.rest(), kept)

    def shared(self) -> Any:
        return extra_state(self._module) or None

    def load_shared(self, state: Any) -> None:
        load_extra_state(self._module, state)


class OptionsPart(Part):
    """An optimizer's options, such as learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer, models: Sequence[FSDP]) -> None:
        """`models` are those whose parameters a plain optimizer may have."""
        self._optimizer = optimizer
        self._models = models
        self.kind = f"options of {type(optimizer).__name__}"

    def shared(self) -> list[dict[str, Any]]:
        """Raises UsageError for an optimizer that has got parameters of something that is not kept."""
        _check_optimizer(self._optimizer, self._models)
        return [{key: value for key, value in group.items() if key not in _PARAMETERS} for group in self._optimizer.param_groups]

    def check(self, kept: Mapping[str, Tensor], state: Any) -> None:
        name, groups = type(self._optimizer).__name__, self._optimizer.param_groups
        if len(state) != len(groups):
            raise UsageError(
                f"{name} had {len(state)} parameter groups when its state was kept, but has {len(groups)} now; give it the same groups"
            )

    def load_shared(self, state: Any) -> None:
        for group, options in zip(self._optimizer.param_groups, state, strict=True):
            group.update((key, value) for key, value in options.items() if key not in _PARAMETERS)


class StatefulPart(Part):
    """Whatever has a `state_dict`."""

    def __init__(self, thing: Stateful) -> None:
        self._thing = thing
        self.kind = f"state of {type(thing).__name__}" if isinstance(thing, LRScheduler) else "state"

    def shared(self) -> Any:
        return self._thing.state_dict()

    def load_shared(self, state: Any) -> None:
        self._thing.load_state_dict(state)


def parts_of(things: Sequence[object]) -> list[Part]:
    """The parts of models, optimizers, schedulers and the like. Raises UsageError for anything else."""
    models = [thing.fsdp if isinstance(thing, AsyncFSDP) else thing for thing in things if isinstance(thing, FSDP | AsyncFSDP)]
    plain = [thing for thing in things if isinstance(thing, torch.optim.Optimizer) and not isinstance(thing, ZeroOptimizer)]
    for optimizer in plain:
        _check_optimizer(optimizer, models)
    zeros = [thing for thing in things if isinstance(thing, ZeroOptimizer)]
    _check_modules(zeros, things, _parameters(zeros))
    parts: list[Part] = []
    for thing in things:
        match thing:
            case AsyncFSDP():
                parts.append(ModelPart(thing.fsdp, plain))
            case FSDP():
                parts.append(ModelPart(thing, plain))
            case ZeroOptimizer():
                parts += [ZeroPart(thing), OptionsPart(thing, models)]
            case torch.optim.Optimizer():
                parts.append(OptionsPart(thing, models))
            case nn.Module():
                _refuse_slices(thing)
                parts.append(ModulePart(thing, zeros))
            case Stateful():
                parts.append(StatefulPart(thing))
            case _:
                raise UsageError(f"a {type(thing).__name__} has no state_dict() and load_state_dict(), so it cannot be kept: {thing!r}")
    return parts


def _refuse_slices(module: nn.Module) -> None:
    """Raise UsageError for the inner module of a sharded model, whose parameters each rank has only slices of."""
    if any(sharded_by(parameter) is not None for parameter in module.parameters()):
        raise UsageError(f"{type(module).__name__} has sharded parameters; give the sharded model that contains it instead")


def _parameters(optimizers: Iterable[torch.optim.Optimizer]) -> set[Tensor]:
    return {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}


def _check_optimizer(optimizer: torch.optim.Optimizer, models: Sequence[FSDP]) -> None:
    """Raise UsageError for a plain optimizer with parameters of no such model."""
    if isinstance(optimizer, ZeroOptimizer):
        return
    unknown = _parameters([optimizer]).difference(*(group.originals for model in models for group in model.groups))
    if unknown and not unknown.issubset(parameter for model in models for parameter in model.parameters()):
        raise UsageError(
            f"{type(optimizer).__name__} has parameters that are in none of the sharded models given here; give their model, too, or, if "
            "every rank has the parameters whole, use a ZeroOptimizer"
        )


def _check_modules(zeros: Sequence[ZeroOptimizer], things: Sequence[object], stepped: AbstractSet[Tensor]) -> None:
    """Raise UsageError for a module that was given to an optimizer but not here, and that has more than what the optimizer steps."""
    given = {module for thing in things if isinstance(thing, nn.Module) for module in thing.modules()}
    for module in (optimizer.module for optimizer in zeros):
        if module is None or module in given:
            continue
        named = named_tensors(with_slices(module, keep_vars=True), _tensors(module))
        lost = next((name for name, tensor in named.items() if tensor is not None and tensor not in stepped), None)
        if lost is not None:
            raise UsageError(f"{ZeroOptimizer.__name__} does not keep {lost} of its module, which it does not step; give the module, too")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by their paths."""
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))
