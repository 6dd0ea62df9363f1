"""`Inventory`: all parts of a training under names of their own."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardnet.errors import UsageError
from shardnet.state.part import Whole
from shardnet.state.parts import parts_of
from shardnet.state.piece import Piece, Span

Tensor = torch.Tensor


class Kept(NamedTuple):
    """Where a tensor of a module's state_dict is kept."""

    name: str  # in the state_dict
    spread: Whole | None  # the whole parameter, if it is spread over ranks
    own: str | None  # the name under which it is kept, if each rank has it whole; None: a hook of the module has computed it


class Inventory:
    """What a training has, in the order in which it was given; lives as long as the things in it. Two models may have parameters of the
    same name, so each name here begins with the number of its part."""

    def __init__(self, things: Sequence[object]) -> None:
        """Raises UsageError for things that cannot be kept."""
        self._parts = parts_of(things)

    @property
    def kinds(self) -> list[str]:
        """What the parts are; equal wherever the same things were given in the same order."""
        return [part.kind for part in self._parts]

    def sizes(self) -> dict[str, int]:
        """The elements of each parameter that is spread over ranks; the same on all of them."""
        return {_prefix(index) + name: numel for index, part in enumerate(self._parts) for name, numel in part.sizes().items()}

    def wanted(self) -> dict[str, Span]:
        """What this rank holds of the parameters that are spread over ranks, by name."""
        return {
            renamed.name: renamed for index, part in enumerate(self._parts) for renamed in (_renamed(index, span) for span in part.wanted())
        }

    def pieces(self) -> Iterator[tuple[Piece, bool]]:
        """The spans of `wanted` with their content, and whether other ranks have the same; the tensors are the things' own."""
        for index, part in enumerate(self._parts):
            for piece in part.pieces():
                yield Piece(_renamed(index, piece.span), piece.state), part.replicated

    def rest(self) -> list[dict[str, Tensor]]:
        """For each part, what this rank holds whole and as its own; the tensors are the things' own."""
        return [part.rest() for part in self._parts]

    def modules(self) -> list[list[Kept]]:
        """Of each part that is a module: the tensors of its state_dict, and where they are kept; [] of others."""
        spread = self._spread()
        return [list(_kept(part.named(), spread, part.whole())) for part in self._parts]

    def wholes(self) -> list[Whole]:
        """The parameters that `sizes` names."""
        return list(self._spread().values())

    def _spread(self) -> dict[Tensor, Whole]:
        return {
            tensor: whole._replace(name=_prefix(index) + whole.name)
            for index, part in enumerate(self._parts)
            for tensor, whole in part.spread().items()
        }

    def shared(self) -> list[Any]:
        """For each part, what is the same on all ranks."""
        return [part.shared() for part in self._parts]

    def check(self, rest: Sequence[Mapping[str, Tensor]], shared: Sequence[Any]) -> None:
        """Raise UsageError, and change nothing, if these are of things of the same kinds that were built otherwise."""
        for part, tensors, state in zip(self._parts, rest, shared, strict=True):
            part.check(tensors, state)

    @torch.no_grad()
    def load(self, pieces: Mapping[str, Piece], rest: Sequence[Mapping[str, Tensor]], shared: Sequence[Any]) -> None:
        """Take all of it back: the wanted pieces by name, the others in the order in which they were given; copied. A collective. Raises
        UsageError as `check` does, before anything is changed."""
        self.check(rest, shared)
        for index, (part, tensors, state) in enumerate(zip(self._parts, rest, shared, strict=True)):
            prefix = _prefix(index)
            part.load({name.removeprefix(prefix): piece for name, piece in pieces.items() if name.startswith(prefix)})
            part.load_rest(tensors)
            if state is not None:
                part.load_shared(state)

    def check_kinds(self, kinds: Sequence[str], where: str) -> None:
        """Raise UsageError unless the state to be loaded is of the same kinds of things; `where` says in a few words where those were
        given."""
        if list(kinds) != self.kinds:
            raise UsageError(
                f"the things given now ({', '.join(self.kinds)}) differ from those given {where} ({', '.join(kinds)}); "
                "give the same things in the same order"
            )


def _kept(named: Mapping[str, Tensor | None], spread: Mapping[Tensor, Whole], whole: Mapping[str, Tensor]) -> Iterator[Kept]:
    own = {tensor: name for name, tensor in whole.items()}
    for name, tensor in named.items():
        if tensor is None:
            yield Kept(name, None, None)
        else:
            assert tensor in spread or tensor in own, name
            yield Kept(name, spread.get(tensor), own.get(tensor))


def _prefix(index: int) -> str:
    return f"{index}/"


def _renamed(index: int, span: Span) -> Span:
    return Span(_prefix(index) + span.name, span.start, span.stop)
