"""The things that a training has, and what must be kept of each."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardnet.errors import UsageError
from shardnet.fsdp import FSDP, AsyncFSDP
from shardnet.fsdp.state import with_slices
from shardnet.sharding import ParameterSlice
from shardnet.state.modules import extra_state, load_extra_state, moments_of, take_back, without_moments
from shardnet.state.piece import VALUES, Piece, Span
from shardnet.zero import ZeroOptimizer
from shardnet.zero.pieces import all_slices, named_parameters, owned, replace_owned

Tensor = torch.Tensor


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

    def rest(self) -> dict[str, Tensor]:
        """What every rank holds whole and as its own; the tensors are the part's own."""
        return {}

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        """Take `rest` back; the tensors are copied."""

    def named(self) -> dict[str, Tensor]:
        """If it is a module: the parameters and buffers of its state_dict, by their names there, tied ones under each; the module's own."""
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
        self._stepped_by = {parameter: each for each in optimizers for group in each.param_groups for parameter in group["params"]}
        self.replicated = any(group.replica_count > 1 for group in model.groups)

    def sizes(self) -> dict[str, int]:
        return {spec.name: spec.numel for group in self._model.groups for spec in group.layout.specs}

    def wanted(self) -> list[Span]:
        return _spans(piece for group in self._model.groups for piece in group.slices)

    def pieces(self) -> Iterator[Piece]:
        for piece, parameter in self._held():
            optimizer = self._optimizer_of(parameter)
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            yield Piece(_span(piece), {VALUES: parameter.detach(), **state})

    @torch.no_grad()
    def load(self, pieces: Mapping[str, Piece]) -> None:
        for piece, parameter in self._held():
            found = dict(pieces[piece.name].state)
            parameter.copy_(found.pop(VALUES))
            if (optimizer := self._optimizer_of(parameter)) is not None:
                optimizer.state[parameter] = _own(found, parameter)  # {}: the optimizer makes its state in its next step

    def named(self) -> dict[str, Tensor]:
        return _named(self._model.module, with_slices(self._model.module))

    def spread(self) -> dict[Tensor, Whole]:
        return {
            placed.parameter: Whole.of(placed.parameter, spec.name, spec.shape)
            for group in self._model.groups
            for placed, spec in zip(group.placed, group.layout.specs, strict=True)
        }

    def rest(self) -> dict[str, Tensor]:
        whole = self._whole()
        return {**_detached(whole), **dict(self._model.named_buffers()), **moments_of(whole, self._optimizer_of)}

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        others, moments = without_moments(kept)
        whole = self._whole()
        take_back(self._model.module, {**_detached(whole), **dict(self._model.named_buffers())}, others)
        for name, parameter in whole.items():
            if name in moments and (optimizer := self._optimizer_of(parameter)) is not None:
                optimizer.state[parameter] = _own(moments[name], parameter)

    def shared(self) -> Any:
        return extra_state(self._model.module) or None

    def load_shared(self, state: Any) -> None:
        load_extra_state(self._model.module, state)

    def _whole(self) -> dict[str, nn.Parameter]:
        """Parameters that are not spread over ranks: those of ignored modules."""
        sharded = set(self.sizes())
        return {name: parameter for name, parameter in self._model.named_parameters() if name not in sharded}

    def _held(self) -> Iterator[tuple[ParameterSlice, nn.Parameter]]:
        for group in self._model.groups:
            for piece, placed in zip(group.slices, group.placed, strict=True):
                if piece.numel:
                    yield piece, placed.parameter

    def _optimizer_of(self, parameter: Tensor) -> torch.optim.Optimizer | None:
        return self._stepped_by.get(parameter)


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
        found = {}
        for name, piece in pieces.items():
            state = dict(piece.state)
            values = state.pop(VALUES)
            found[name] = values, _own(state, values)
        replace_owned(self._optimizer, found)


class ModulePart(Part):
    """A module that every rank has whole, such as a running average of another one; `stepped` are the parameters that a ZeroPart keeps."""

    kind = "module"

    def __init__(self, module: nn.Module, stepped: AbstractSet[Tensor]) -> None:
        self._module = module
        self._stepped = stepped

    def named(self) -> dict[str, Tensor]:
        return _named(self._module, self._module.state_dict())

    def rest(self) -> dict[str, Tensor]:
        own = {name: parameter for name, parameter in self._module.named_parameters() if parameter not in self._stepped}
        return {**_detached(own), **dict(self._module.named_buffers())}

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        take_back(self._module, self.rest(), kept)

    def shared(self) -> Any:
        return extra_state(self._module) or None

    def load_shared(self, state: Any) -> None:
        load_extra_state(self._module, state)


class OptionsPart(Part):
    """An optimizer's options, such as learning rates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.kind = f"options of {type(optimizer).__name__}"

    def shared(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in ("params", "param_names")} for group in self._optimizer.param_groups
        ]

    def load_shared(self, state: Any) -> None:
        groups = self._optimizer.param_groups
        if len(state) != len(groups):
            raise UsageError(
                f"the {type(self._optimizer).__name__} had {len(state)} groups of parameters in the epoch before and has {len(groups)} in "
                "this one: build it alike in every epoch"
            )
        for group, options in zip(groups, state, strict=True):
            group.update(options)


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
    sharded = {parameter for model in models for parameter in model.parameters()}
    for optimizer in plain:
        if any(parameter not in sharded for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                f"a {type(optimizer).__name__} has parameters of no sharded model that was given: give the model, too, or, if every rank "
                "has the parameters whole, make it a ZeroOptimizer"
            )
    zeros = [thing for thing in things if isinstance(thing, ZeroOptimizer)]
    stepped = {parameter for optimizer in zeros for group in optimizer.param_groups for parameter in group["params"]}
    _check_modules(zeros, things, stepped)
    parts: list[Part] = []
    for thing in things:
        match thing:
            case AsyncFSDP():
                parts.append(ModelPart(thing.fsdp, plain))
            case FSDP():
                parts.append(ModelPart(thing, plain))
            case ZeroOptimizer():
                parts += [ZeroPart(thing), OptionsPart(thing)]
            case torch.optim.Optimizer():
                parts.append(OptionsPart(thing))
            case nn.Module():
                parts.append(ModulePart(thing, stepped))
            case Stateful():
                parts.append(StatefulPart(thing))
            case _:
                raise UsageError(f"a {type(thing).__name__} has no state_dict() and load_state_dict(), so it cannot be kept: {thing!r}")
    return parts


def _check_modules(zeros: Sequence[ZeroOptimizer], things: Sequence[object], stepped: AbstractSet[Tensor]) -> None:
    """Raise UsageError for a module that was given to an optimizer but not here, and that has more than what the optimizer steps."""
    given = {module for thing in things if isinstance(thing, nn.Module) for module in thing.modules()}
    for module in (optimizer.module for optimizer in zeros):
        if module is None or module in given:
            continue
        lost = next((name for name, tensor in _named(module, module.state_dict()).items() if tensor not in stepped), None)
        if lost is not None:
            raise UsageError(
                f"a {ZeroOptimizer.__name__} is to be kept without its module, whose {lost} it does not step: give the module, too"
            )


def _named(module: nn.Module, state: Iterable[str]) -> dict[str, Tensor]:
    own = dict(chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)))
    return {name: own[name] for name in state if name in own}


def _detached(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named.items()}


def _span(piece: ParameterSlice) -> Span:
    return Span(piece.name, piece.start, piece.stop)


def _spans(pieces: Iterable[ParameterSlice]) -> list[Span]:
    return [_span(piece) for piece in pieces if piece.numel]


def _own(state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """A copy of an optimizer's state of one parameter, on the device where the optimizer needs it: tensors with dimensions go to the
    parameter's."""
    return {
        key: (value.to(like.device, copy=True) if value.dim() else value.clone()) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
