"""The things that a training has, and what must be kept of each."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, AsyncFSDP
from shardnet.fsdp.group import sharded_by
from shardnet.fsdp.state import sharded_names, with_slices
from shardnet.sharding import ParameterSlice
from shardnet.state.modules import (
    check_extra_state,
    check_whole,
    extra_state,
    load_extra_state,
    moments_of,
    take_back,
    without_moments,
)
from shardnet.state.piece import VALUES, Piece, Span, is_per_element
from shardnet.zero import ZeroOptimizer
from shardnet.zero.pieces import all_slices, named_parameters, owned, replace_owned

Tensor = torch.Tensor
_PARAMETERS = ("params", "param_names")  # of a group's options
_EXTRA_STATE = "_extra_state"  # torch's name in a state_dict for what a module returns from get_extra_state, which may be a tensor


@runtime_checkable
class Stateful(Protocol):
    """Schedulers, scalers, and whatever else has a small state that is the same on all ranks."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any) -> Any: ...


class Whole(NamedTuple):
    """A parameter that is spread over ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # without the "torch."

    @classmethod
    def of(cls, parameter: Tensor, name: str, shape: tuple[int, ...]) -> "Whole":
        return cls(name, shape, str(parameter.dtype).removeprefix("torch."))


class Part:
    """One thing that a training has. A method that a subclass does not override means that it has nothing of the kind."""

    kind: str  # what it is in a word or two, with its class where the wrong class would accept the state without an error
    replicated = False  # whether other ranks hold the same pieces

    def sizes(self) -> dict[str, int]:
        """The elements of each parameter that is spread over ranks, by name; the same on all of them."""
        return {}

    def wanted(self) -> list[Span]:
        """What this rank holds of those parameters; no empty spans."""
        return []

    def pieces(self) -> Iterator[Piece]:
        """The same spans with their content; the tensors are the part's own."""
        return iter(())

    def load(self, pieces: Mapping[str, Piece]) -> None:
        """Take back what is wanted, by name; the tensors are copied. A collective."""

    def check(self, kept: Mapping[str, Tensor], state: Any) -> None:
        """Raise UsageError if the part cannot take back this `rest` and this `shared`; nothing is changed."""

    def rest(self) -> dict[str, Tensor]:
        """What every rank holds whole and as its own; the tensors are the part's own."""
        return {}

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        """Take `rest` back; the tensors are copied."""

    def whole(self) -> dict[str, Tensor]:
        """The module's own tensors for what `rest` has of them, by the names there."""
        return {}

    def named(self) -> dict[str, Tensor | None]:
        """If it is a module: the tensors of its state_dict by their names there, tied ones under each. They are the module's own parameters
        and buffers, those of `spread` and `whole`; None stands for what a hook has made of them."""
        return {}

    def spread(self) -> dict[Tensor, Whole]:
        """The modules' tensors for the parameters that `sizes` names, and what each of these parameters is as a whole."""
        return {}

    def shared(self) -> Any:
        """What is the same on all ranks."""
        return None

    def load_shared(self, state: Any) -> None:
        """Take `shared` back."""


class ModelPart(Part):
    """A sharded model, with plain optimizers' state for its parameters."""

    kind = "model"

    def __init__(self, model: FSDP, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._model = model
        self._optimizers = optimizers
        self.replicated = any(group.replica_count > 1 for group in model.groups)

    def sizes(self) -> dict[str, int]:
        return {spec.name: spec.numel for group in self._model.groups for spec in group.layout.specs}

    def wanted(self) -> list[Span]:
        return _spans(piece for group in self._model.groups for piece in group.slices)

    def pieces(self) -> Iterator[Piece]:
        stepped_by = self._stepped_by()
        for piece, parameter in self._held():
            optimizer = stepped_by.get(parameter)
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            yield Piece(_span(piece), {VALUES: parameter.detach(), **state})

    @torch.no_grad()
    def load(self, pieces: Mapping[str, Piece]) -> None:
        stepped_by = self._stepped_by()
        for piece, parameter in self._held():
            found = dict(pieces[piece.name].state)
            values = found.pop(VALUES)
            parameter.copy_(values)
            if (optimizer := stepped_by.get(parameter)) is not None:
                # {}: the optimizer makes its state in its next step
                optimizer.state[parameter] = _own(found, parameter, values.dtype)
        self._load_nothing()

    def named(self) -> dict[str, Tensor | None]:
        module, groups = self._model.module, self._model.groups
        own = self.whole() | {path: placed.parameter for group in groups for placed in group.placed for path in placed.names}
        gathered_too = {name: placed.parameter for name, placed in sharded_names(module, groups).items()}
        return _named(with_slices(module, keep_vars=True) | gathered_too, own)

    def spread(self) -> dict[Tensor, Whole]:
        return {
            placed.parameter: Whole.of(placed.parameter, spec.name, spec.shape)
            for group in self._model.groups
            for placed, spec in zip(group.placed, group.layout.specs, strict=True)
        }

    def whole(self) -> dict[str, Tensor]:
        """Parameters of ignored modules, and buffers."""
        sharded = {tensor for group in self._model.groups for tensor in (*group.originals, *group.leaves)}
        paths = set(self.sizes())
        ignored = {name: each for name, each in self._model.named_parameters() if name not in paths and each not in sharded}
        return {**ignored, **dict(self._model.named_buffers())}

    def rest(self) -> dict[str, Tensor]:
        whole = self.whole()
        ignored = {name: tensor for name, tensor in whole.items() if isinstance(tensor, nn.Parameter)}
        return {**_detached(whole), **moments_of(ignored, self._stepped_by())}

    def check(self, kept: Mapping[str, Tensor], state: Any) -> None:
        whole = self.whole()
        others, _ = without_moments(kept, whole)
        check_whole(self._model.module, whole, others)
        check_extra_state(self._model.module, state or {})

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        whole, stepped_by = self.whole(), self._stepped_by()
        others, moments = without_moments(kept, whole)
        take_back(self._model.module, _detached(whole), others)
        for name, tensor in whole.items():
            if (optimizer := stepped_by.get(tensor)) is not None:
                optimizer.state[tensor] = _own(moments.get(name, {}), tensor, others[name].dtype)

    def shared(self) -> Any:
        return extra_state(self._model.module) or None

    def load_shared(self, state: Any) -> None:
        load_extra_state(self._model.module, state)

    def _load_nothing(self) -> None:
        """Give empty slices, of which no file has anything, a state of no elements where the optimizer's group has a state: a fused SGD
        steps a group only if all of it has momentum, or none."""
        held = {parameter for _, parameter in self._held()}
        empty = {parameter for group in self._model.groups for parameter in group.originals} - held
        for optimizer in self._optimizers:
            for options in optimizer.param_groups:
                like = next((each for each in options["params"] if each in held and optimizer.state.get(each)), None)
                for parameter in empty.intersection(options["params"]):
                    optimizer.state.pop(parameter, None)
                    if like is not None:
                        optimizer.state[parameter] = {
                            key: value.new_empty(0) if is_per_element(value, like.numel()) else copy.deepcopy(value)
                            for key, value in optimizer.state[like].items()
                        }

    def _held(self) -> Iterator[tuple[ParameterSlice, nn.Parameter]]:
        for group in self._model.groups:
            for piece, placed in zip(group.slices, group.placed, strict=True):
                if piece.numel:
                    yield piece, placed.parameter

    def _stepped_by(self) -> dict[Tensor, torch.optim.Optimizer]:
        """The optimizers, which may get parameters at any time, by parameter."""
        return {parameter: each for each in self._optimizers for group in each.param_groups for parameter in group["params"]}


class ZeroPart(Part):
    """A `ZeroOptimizer`, with the parameters that it steps."""

    def __init__(self, optimizer: ZeroOptimizer) -> None:
        self._optimizer = optimizer
        self.kind = f"{type(optimizer).__name__} of {optimizer.optimizer_class.__name__}"

    def sizes(self) -> dict[str, int]:
        return {piece.name: torch.Size(piece.shape).numel() for piece in all_slices(self._optimizer)}

    def wanted(self) -> list[Span]:
        return _spans(all_slices(self._optimizer))

    def spread(self) -> dict[Tensor, Whole]:
        return {parameter: Whole.of(parameter, piece.name, piece.shape) for parameter, piece in named_parameters(self._optimizer).items()}

    def pieces(self) -> Iterator[Piece]:
        for piece, values, state in owned(self._optimizer):
            yield Piece(_span(piece), {VALUES: values, **state})

    def load(self, pieces: Mapping[str, Piece]) -> None:
        held = {piece.name: values for piece, values, _ in owned(self._optimizer)}
        found = {}
        for name, piece in pieces.items():
            state = dict(piece.state)
            values = state.pop(VALUES)
            found[name] = values, _own(state, held[name], values.dtype)
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
        return _named(with_slices(self._module, keep_vars=True), _tensors(self._module))

    def rest(self) -> dict[str, Tensor]:
        return _detached(self.whole())

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
        named = _named(with_slices(module, keep_vars=True), _tensors(module))
        lost = next((name for name, tensor in named.items() if tensor is not None and tensor not in stepped), None)
        if lost is not None:
            raise UsageError(f"{ZeroOptimizer.__name__} does not keep {lost} of its module, which it does not step; give the module, too")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers by their paths."""
    return dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))


def _named(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """See `Part.named`. `state` is a state_dict with `keep_vars`, and `own` the module's own tensors by their paths: hooks may rename
    tensors, or put a copy, such as one on another device, in the place of one."""
    known = set(own.values())
    return {
        name: tensor if tensor in known else own.get(name)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and name.rpartition(".")[2] != _EXTRA_STATE
    }


def _detached(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named.items()}


def _span(piece: ParameterSlice) -> Span:
    return Span(piece.name, piece.start, piece.stop)


def _spans(pieces: Iterable[ParameterSlice]) -> list[Span]:
    return [_span(piece) for piece in pieces if piece.numel]


def _own(state: Mapping[str, Any], like: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """A copy of an optimizer's state of one parameter, on the device where the optimizer needs it: tensors with dimensions go to the
    parameter's. `dtype` is that of the parameter when the state was kept: tensors with dimensions that had it get the parameter's."""

    def copied(value: Tensor) -> Tensor:
        if not value.dim():
            return value.clone()
        return value.to(like.device, like.dtype if value.dtype == dtype else value.dtype, copy=True)

    return {key: copied(value) if isinstance(value, Tensor) else value for key, value in state.items()}
