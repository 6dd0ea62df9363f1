"""Finding and replacing tensors in what a module is called with and returns."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, mappings, dataclasses and whatever is registered as a pytree."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for entry in fields(value):
            yield from tensors_in(getattr(value, entry.name))
    elif type(value) in pytree.SUPPORTED_NODES:
        for leaf in pytree.tree_leaves(value):
            yield from tensors_in(leaf)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """`value` with `function` applied to every tensor in what `tensors_in` searches, except subclasses of list and unnamed ones of tuple.

    A container in which no tensor is replaced stays the same object: the caller may look there for what the module puts into it.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) in pytree.SUPPORTED_NODES or pytree.is_namedtuple_instance(value):
        leaves, structure = pytree.tree_flatten(value, is_leaf=lambda inner: inner is not value)
        return _rebuilt(value, leaves, function, lambda mapped: pytree.tree_unflatten(mapped, structure))
    if is_dataclass(value) and not isinstance(value, type):
        entries = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return _rebuilt(value, entries.values(), function, lambda mapped: replace(value, **dict(zip(entries, mapped, strict=True))))
    if isinstance(value, MutableMapping):
        return _rebuilt(value, value.values(), function, lambda mapped: _refilled(value, mapped))
    return value


def _rebuilt(value: Any, inner: Iterable[Any], function: Callable[[torch.Tensor], torch.Tensor], build: Callable[[list[Any]], Any]) -> Any:
    inner = list(inner)
    mapped = [map_tensors(function, item) for item in inner]
    return value if all(new is old for new, old in zip(mapped, inner, strict=True)) else build(mapped)


def _refilled(mapping: MutableMapping[Any, Any], values: list[Any]) -> MutableMapping[Any, Any]:
    """A mapping of the same type, keys and attributes, with other values."""
    filled = copy.copy(mapping)
    filled.update(zip(mapping, values, strict=True))
    return filled


def differentiable(value: object) -> list[torch.Tensor]:
    """The tensors in `value` that an operation made and that pass gradients on; for an object of any other class, those in its
    attributes."""
    found = [tensor for tensor in tensors_in(value) if tensor.grad_fn is not None]
    if found or not hasattr(value, "__dict__"):
        return found
    return [tensor for tensor in tensors_in(vars(value)) if tensor.grad_fn is not None]


def with_bases(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, and those that they are views of.

    A hook on a view is lost when the view is changed in place, since autograd then rewrites the view's history. The
    history of its base is kept, so a hook on the base still runs, and before anything that made it.
    """
    return tensors + [tensor._base for tensor in tensors if tensor._base is not None and tensor._base.grad_fn is not None]
