"""What each rank holds whole of a module, with the optimizers' state for it, and how that is given back."""

import copy
import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from shardnet.errors import UsageError
from shardnet.zero.codec import Outline

Tensor = torch.Tensor
_MOMENT = ": "  # between a parameter's name and the key of the optimizer's state for it
_NUMBER = "number "  # before the key, where the value is a Python number and not a tensor
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}


def check_whole(module: nn.Module, own: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    """Raise UsageError unless `take_back` can give a module all that was kept of it, and `own` has no parameter of which nothing was."""
    for name, tensor in kept.items():
        here = own.get(name)
        if here is not None and here.shape == tensor.shape:
            continue
        holder, leaf = _holder(module, name)
        if holder is None or (leaf not in holder._buffers and hasattr(holder, leaf)):
            raise UsageError(
                f"{name} had shape {list(tensor.shape)} before, which does not fit the model now; build the same model as before"
            )
    new = next((name for name, tensor in own.items() if isinstance(tensor, nn.Parameter) and name not in kept), None)
    if new is not None:
        raise UsageError(f"no state was kept for the parameter {new} of shape {list(own[new].shape)}; build the same model as before")


def take_back(module: nn.Module, own: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> None:
    """Copy what was kept of a module's parameters and buffers into `own`, its tensors by name, after `check_whole`.

    A buffer that has another size now, or does not exist yet because computing fills it, is made again.
    """
    for name, tensor in kept.items():
        here = own.get(name)
        if here is not None and here.shape == tensor.shape:
            here.copy_(tensor)
        else:
            _make_anew(module, name, tensor)


def _make_anew(module: nn.Module, name: str, tensor: Tensor) -> None:
    holder, leaf = _holder(module, name)
    assert holder is not None, name
    beside = chain([holder._buffers.get(leaf)], holder.parameters(), holder.buffers())
    like = next((each for each in beside if each is not None), None)
    holder._buffers[leaf] = tensor.to("cpu" if like is None else like.device, copy=True)


def _holder(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    where, _, leaf = name.rpartition(".")
    return dict(module.named_modules()).get(where), leaf


def moments_of(whole: Mapping[str, Tensor], stepped_by: Mapping[Tensor, torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The optimizers' state for these parameters, under names that no parameter has. Raises UsageError for state that cannot be kept."""
    found = {}
    for name, parameter in whole.items():
        optimizer = stepped_by.get(parameter)
        for key, value in {} if optimizer is None else optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{name}{_MOMENT}{key}"] = value
            elif type(value) in _NUMBERS:
                found[f"{name}{_MOMENT}{_NUMBER}{key}"] = torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")
            elif value is not None:
                raise UsageError(
                    f"the state of {type(optimizer).__name__} for {name} must be tensors and numbers to be kept, but {key} is a "
                    f"{type(value).__name__}"
                )
    return found


def without_moments(kept: Mapping[str, Tensor], own: Collection[str]) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Split `kept` into the tensors that `moments_of` did not add, by name, and those that it added, by parameter. `own` are the names that
    the module's tensors have now: a module may have a colon in its name."""
    others: dict[str, Tensor] = {}
    moments: dict[str, dict[str, Any]] = {}
    for name, tensor in kept.items():
        ends = (match.start() for match in re.finditer(_MOMENT, name))
        parameter = max((name[:end] for end in ends if name[:end] in kept), key=len, default=None)
        if parameter is None or name in own:
            others[name] = tensor
        else:
            key = name.removeprefix(parameter + _MOMENT)
            moments.setdefault(parameter, {})[key.removeprefix(_NUMBER)] = tensor.item() if key.startswith(_NUMBER) else tensor
    return others, moments


def extra_state(module: nn.Module) -> dict[str, Any]:
    """What modules return from `get_extra_state`, by the modules' names. Raises UsageError for what cannot be kept."""
    found = {
        name: each.get_extra_state() for name, each in module.named_modules() if type(each).get_extra_state is not nn.Module.get_extra_state
    }
    for name, state in found.items():
        try:
            Outline.of(state)
        except UsageError as error:
            raise UsageError(f"get_extra_state() of {name or 'the model'}: {error}") from None
    return found


def check_extra_state(module: nn.Module, kept: Mapping[str, Any]) -> None:
    """Raise UsageError for the state of a module that does not exist."""
    modules = dict(module.named_modules())
    for name in kept:
        if name not in modules:
            raise UsageError(f"the module {name} had a get_extra_state() before, but does not exist now; build the same model as before")


def load_extra_state(module: nn.Module, kept: Mapping[str, Any]) -> None:
    """Give the modules what `extra_state` found, after `check_extra_state`."""
    modules = dict(module.named_modules())
    for name, state in kept.items():
        modules[name].set_extra_state(copy.deepcopy(state))
