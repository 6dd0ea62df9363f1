"""`ModelPart`: a sharded model, and what must be kept of it."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardnet.fsdp import FSDP
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
from shardnet.state.part import Part, Whole, detached, named_tensors, own_state, span_of, spans_of
from shardnet.state.piece import VALUES, Piece, Span, is_per_element

Tensor = torch.Tensor


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
        return spans_of(piece for group in self._model.groups for piece in group.slices)

    def pieces(self) -> Iterator[Piece]:
        stepped_by = self._stepped_by()
        for piece, parameter in self._held():
            optimizer = stepped_by.get(parameter)
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            yield Piece(span_of(piece), {VALUES: parameter.detach(), **state})

    @torch.no_grad()
    def load(self, pieces: Mapping[str, Piece]) -> None:
        stepped_by = self._stepped_by()
        for piece, parameter in self._held():
            found = dict(pieces[piece.name].state)
            values = found.pop(VALUES)
            parameter.copy_(values)
            if (optimizer := stepped_by.get(parameter)) is not None:
                # {}: the optimizer makes its state in its next step
                optimizer.state[parameter] = own_state(found, parameter, values.dtype)
        self._load_nothing()

    def named(self) -> dict[str, Tensor | None]:
        module, groups = self._model.module, self._model.groups
        own = self.whole() | {path: placed.parameter for group in groups for placed in group.placed for path in placed.names}
        gathered_too = {name: placed.parameter for name, placed in sharded_names(module, groups).items()}
        return named_tensors(with_slices(module, keep_vars=True) | gathered_too, own)

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
        return {**detached(whole), **moments_of(ignored, self._stepped_by())}

    def check(self, kept: Mapping[str, Tensor], state: Any) -> None:
        whole = self.whole()
        others, _ = without_moments(kept, whole)
        check_whole(self._model.module, whole, others)
        check_extra_state(self._model.module, state or {})

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        whole, stepped_by = self.whole(), self._stepped_by()
        others, moments = without_moments(kept, whole)
        take_back(self._model.module, detached(whole), others)
        for name, tensor in whole.items():
            if (optimizer := stepped_by.get(tensor)) is not None:
                optimizer.state[tensor] = own_state(moments.get(name, {}), tensor, others[name].dtype)

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
