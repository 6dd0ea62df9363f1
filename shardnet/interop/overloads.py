"""Converts all forms of calls that torch documents for a group's methods to one: lists of tensors, and options.

torch calls `allreduce([tensor], options)` from C++. A program may as well call `allreduce(tensor, ReduceOp.MAX)`, `reduce(tensor, 0)`, or
`broadcast(tensor, root=1, timeout=...)`.
"""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist

R = TypeVar("R")
_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}  # the fields of the options that they set


def overloaded(options: Callable[[], Any], depths: Sequence[int], plain: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorates a method that takes tensors, or lists of them, and `opts` last, so that it takes every form.

    `options` makes the options of a call without any; `depths` says for each argument before `opts` how many lists are around a tensor (0:
    the argument is left as it is); `plain` names, in torch's order, the arguments that may be given instead of options.
    """
    names = plain.split()

    def decorate(method: Callable[..., R]) -> Callable[..., R]:
        parameters = list(inspect.signature(method).parameters)[1:-1]

        @wraps(method)
        def call(self: Any, *given: Any, **named: Any) -> R:
            tensors, rest = given[: len(parameters)], given[len(parameters) :]
            tensors = tuple(map(_nested, tensors, depths))
            others = {_parameter(name, parameters): value for name, value in named.items() if name not in ("opts", *names)}
            others = {
                name: _nested(value, depths[parameters.index(name)]) if name in parameters else value for name, value in others.items()
            }
            return method(self, *tensors, **others, opts=_options(options, names, rest, named))

        return call

    return decorate


def _options(make: Callable[[], Any], names: Sequence[str], rest: Sequence[Any], named: dict[str, Any]) -> Any:
    """The arguments after the tensors, positional or by name, as options."""
    opts = named.get("opts")
    if rest and not isinstance(rest[0], dist.ReduceOp | int | timedelta | None):
        opts, *rest = rest
    if len(rest) > len(names):
        raise TypeError(f"the arguments after the tensors must be options, or {', '.join(names)}; got {', '.join(map(str, rest))}")
    plain = dict(zip(names, rest, strict=False)) | {name: named[name] for name in names if name in named}
    options = make() if opts is None else opts
    for name, value in plain.items():
        if value is not None:
            setattr(options, _FIELDS[name], value)
    return options


def _nested(value: Any, depth: int) -> Any:
    """Put `depth` lists around a tensor, counting those that are there already; a list may be empty."""
    found, inside = 0, value
    while isinstance(inside, Sequence) and found < depth:
        found, inside = (found + 1, inside[0]) if inside else (depth, None)
    for _ in range(depth - found):
        value = [value]
    return value


def _parameter(name: str, parameters: Sequence[str]) -> str:
    """Our name for a parameter of torch's, which has another name in each form: output_tensors, output_tensor, output."""
    stem = name.split("_")[0].removesuffix("s")
    return name if name in parameters else next((each for each in parameters if each.removesuffix("s") == stem), name)
