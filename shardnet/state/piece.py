"""`Piece`: a slice of one parameter, with all that belongs to it.

[Note: what belongs to a slice] The optimizer's state of a slice is cut and joined along with its values, so both move together. A
tensor that has as many elements as the slice has one for each of them. Numbers, text and tensors of one element, such as a step
counter, are the same for all slices of the parameter; where numbers differ, such as norms of slices, that of the first slice is taken.
Anything else, such as a scale for each block of elements, belongs to this slice and to no other: a slice that has it can only be kept and
loaded as it is.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.errors import UsageError

log = logging.getLogger(__name__)

Tensor = torch.Tensor
VALUES = "parameter"  # key of the parameter's own values, beside those of the optimizer's state
_said = set[str]()  # keys of which `_say_once` has warned


@dataclass(frozen=True, slots=True)
class Span:
    """The elements [start, stop) of a flattened parameter."""

    name: str  # the parameter's; the same on all ranks and in all epochs
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Piece:
    """One rank's slice of a parameter. See [Note: what belongs to a slice]."""

    span: Span
    state: dict[str, Any]  # the values under VALUES, and the optimizer's state for them

    def cut(self, start: int, stop: int) -> "Piece":
        """The part of the piece that lies in [start, stop) of the parameter; views. Raises UsageError for state that cannot be cut."""
        whole = self.span
        wanted = Span(whole.name, max(start, whole.start), min(stop, whole.stop))
        if wanted == whole:
            return self
        part = slice(wanted.start - whole.start, wanted.stop - whole.start)
        self.check_divisible()
        return Piece(wanted, {key: value.reshape(-1)[part] if self._is_cut(value) else value for key, value in self.state.items()})

    def check_divisible(self) -> None:
        """Raise UsageError for state that belongs to just this slice. See [Note: what belongs to a slice]."""
        for key, value in self.state.items():
            if not self._is_cut(value) and _has_elements(value):
                held = f"{value.numel()} elements" if isinstance(value, Tensor) else f"tensors in a {type(value).__name__}"
                raise UsageError(
                    f"the optimizer's {key} of {self.span.name} has {held} for a slice of {self.span.numel}: the optimizer does not "
                    "treat each element by itself, so its state can be loaded only where the parameter is sliced as before, and not on "
                    "another number of ranks; use ZeroOptimizer instead"
                )

    def _is_cut(self, value: Any) -> bool:
        return is_per_element(value, self.span.numel)


def is_per_element(value: Any, numel: int) -> bool:
    """Whether something in a slice's state is a tensor with one entry for each of its elements."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.numel() == numel


def join(pieces: Sequence[Piece]) -> Piece:
    """One piece made of several, at least one, that lie end to end, in order. Raises UsageError for state that cannot be joined."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return first
    for piece in pieces:
        piece.check_divisible()
        if piece.state.keys() != first.state.keys():
            raise _differing(first, piece, f"{_listed(first.state)} in the first, {_listed(piece.state)} in the second")
    state = {}
    for key, value in first.state.items():
        if all(piece._is_cut(piece.state[key]) for piece in pieces):
            state[key] = torch.cat([piece.state[key].reshape(-1) for piece in pieces])
            continue
        for piece in pieces:
            if not _same(value, piece.state[key]):
                if not (_is_scalar(value) and _is_scalar(piece.state[key])):
                    raise _differing(first, piece, f"{key} is {value!r} in the first, {piece.state[key]!r} in the second")
                _say_once(key, first.span.name)
                break
        state[key] = value
    return Piece(Span(first.span.name, first.span.start, last.span.stop), state)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _say_once(key: str, name: str) -> None:
    """One number for a slice, such as the norm of what it holds, is no number for a part of it, nor for several: most optimizers compute
    it anew in each step."""
    if key not in _said:
        _said.add(key)
        log.warning(
            "slices of %s, and maybe of other parameters, differ in %r of the optimizer's state; all get the first slice's value", name, key
        )


def _has_elements(value: Any) -> bool:
    """Whether something that is not cut has tensors in it that may belong to one slice."""
    match value:
        case Tensor():
            return value.numel() != 1
        case Mapping():
            return any(isinstance(each, Tensor) or _has_elements(each) for each in value.values())
        case list() | tuple():
            return any(isinstance(each, Tensor) or _has_elements(each) for each in value)
    return False


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.numel() == other.numel() == 1 and _same(one.item(), other.item())
    return type(one) is type(other) and bool(one == other or (one != one and other != other))  # a NaN is the same as another


def _differing(one: Piece, other: Piece, what: str) -> UsageError:
    slices = " and ".join(f"[{piece.span.start}:{piece.span.stop}]" for piece in (one, other))
    return UsageError(
        f"the slices {slices} of {one.span.name} cannot be joined, because the optimizer's state differs between them: {what}. They can be "
        "loaded only where the parameter is sliced as before"
    )


def _listed(state: Mapping[str, Any]) -> str:
    return ", ".join(key for key in state if key != VALUES) or "none"


def covered(spans: Iterable[Span], numel: int) -> bool:
    """Whether these spans of one parameter make up all of it."""
    end = 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > end:
            return False
        end = max(end, span.stop)
    return end >= numel
