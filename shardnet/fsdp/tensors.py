"""Finding tensors in what a module is called with and returns."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass

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


def differentiable(value: object) -> list[torch.Tensor]:
    """The tensors in `value` that an operation made and that pass gradients on."""
    return [tensor for tensor in tensors_in(value) if tensor.grad_fn is not None]


def with_bases(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, and those that they are views of.

    A hook on a view is lost when the view is changed in place, since its history is then written anew. The history of
    its base is kept, so a hook on the base still runs, and before anything that made it.
    """
    return tensors + [tensor._base for tensor in tensors if tensor._base is not None and tensor._base.grad_fn is not None]
