"""`Inventory`: all parts of a training under names of their own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardnet.errors import UsageError
from shardnet.state.parts import parts_of
from shardnet.state.piece import Piece, Span

Tensor = torch.Tensor


class Inventory:
    """What a training has, in the order in which it was given; lives as long as the things in it. Two models may have parameters of one
    name, so that each name here begins with the number of its part."""

    def __init__(self, things: Sequence[object]) -> None:
        """Raises UsageError for things that cannot be kept."""
        self._parts = parts_of(things)

    @property
    def kinds(self) -> list[str]:
        """What the parts are; equal wherever the same things were given in the same order."""
        return [type(part).__name__ for part in self._parts]

    def sizes(self) -> dict[str, int]:
        """The elements of each parameter that is spread over ranks; the same on all of them."""
        return {_prefix(index) + name: numel for index, part in enumerate(self._parts) for name, numel in part.sizes().items()}

    def wanted(self) -> dict[str, Span]:
        """What this rank holds of them, by name."""
        return {
            renamed.name: renamed for index, part in enumerate(self._parts) for renamed in (_renamed(index, span) for span in part.wanted())
        }

    def pieces(self) -> Iterator[tuple[Piece, bool]]:
        """The same with content, and whether other ranks have it as well; the tensors are the things' own."""
        for index, part in enumerate(self._parts):
            for piece in part.pieces():
                yield Piece(_renamed(index, piece.span), piece.state), part.replicated

    def rest(self) -> list[dict[str, Tensor]]:
        """What this rank has whole and for itself, of each part; the things' own."""
        return [part.rest() for part in self._parts]

    def shared(self) -> list[Any]:
        """What is the same on all ranks, of each part."""
        return [part.shared() for part in self._parts]

    @torch.no_grad()
    def load(self, pieces: Mapping[str, Piece], rest: Sequence[Mapping[str, Tensor]], shared: Sequence[Any]) -> None:
        """Take all of it back: the pieces that are wanted by name, the others as they were given; copied. A collective."""
        for index, (part, tensors, state) in enumerate(zip(self._parts, rest, shared, strict=True)):
            prefix = _prefix(index)
            part.load({name.removeprefix(prefix): piece for name, piece in pieces.items() if name.startswith(prefix)})
            for name, tensor in part.rest().items():
                tensor.copy_(tensors[name])
            if state is not None:
                part.load_shared(state)

    def check_kinds(self, kinds: Sequence[str], where: str) -> None:
        """Raise UsageError unless what is to be loaded is of such things; `where` says in a few words where they were given."""
        if list(kinds) != self.kinds:
            raise UsageError(
                f"other things were given {where} ({', '.join(kinds)}) than now ({', '.join(self.kinds)}): give the same in the same order"
            )


def _prefix(index: int) -> str:
    return f"{index}/"


def _renamed(index: int, span: Span) -> Span:
    return Span(_prefix(index) + span.name, span.start, span.stop)
