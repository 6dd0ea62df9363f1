"""`Piece`: a slice of one parameter, with all that belongs to it.

[Note: what belongs to a slice] The optimizer's state of a slice is cut and joined along with its values, so both move together. A
tensor that has as many elements as the slice has one for each of them; anything else, such as a step counter, is the same for all
slices of the parameter.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.errors import UsageError

Tensor = torch.Tensor
VALUES = "parameter"  # key of the parameter's own values, beside those of the optimizer's state


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
        return Piece(wanted, {key: self._cut(key, value, part) for key, value in self.state.items()})

    def _cut(self, key: str, value: Any, part: slice) -> Any:
        if not isinstance(value, Tensor) or not value.dim():
            return value
        if value.numel() != self.span.numel:
            raise UsageError(
                f"the optimizer's {key} of {self.span.name} has {value.numel()} elements for a slice of {self.span.numel}: it does not "
                "treat elements alone, so its state cannot be spread over another number of ranks; use ZeroOptimizer for it"
            )
        return value.reshape(-1)[part]


def join(pieces: Sequence[Piece]) -> Piece:
    """One piece made of several, at least one, that lie end to end, in order."""
    first, last = pieces[0], pieces[-1]
    if len(pieces) == 1:
        return first
    state = {}
    for key, value in first.state.items():
        is_cut = isinstance(value, Tensor) and value.dim() and value.numel() == first.span.numel
        state[key] = torch.cat([piece.state[key].reshape(-1) for piece in pieces]) if is_cut else value
    return Piece(Span(first.span.name, first.span.start, last.span.stop), state)


def covered(spans: Iterable[Span], numel: int) -> bool:
    """Whether these spans of one parameter make up all of it."""
    end = 0
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > end:
            return False
        end = max(end, span.stop)
    return end >= numel
