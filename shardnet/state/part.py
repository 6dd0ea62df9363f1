"""`Part`: one thing that a training has."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from shardnet.sharding import ParameterSlice
from shardnet.state.piece import Piece, Span

Tensor = torch.Tensor
_EXTRA_STATE = "_extra_state"  # torch's name in a state_dict for what a module returns from get_extra_state, which may be a tensor


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

    def check(self, kept: Mapping[str, Tensor], state: Any) -> None:
        """Raise UsageError if the part cannot take back this `rest` and this `shared`; nothing is changed."""

    def rest(self) -> dict[str, Tensor]:
        """What every rank holds whole and as its own; the tensors are the part's own."""
        return {}

    def load_rest(self, kept: Mapping[str, Tensor]) -> None:
        """Take `rest` back; the tensors are copied."""

    def whole(self) -> dict[str, Tensor]:
        """The module's own tensors for what `rest` has of them, by the names there."""
        return {}

    def named(self) -> dict[str, Tensor | None]:
        """If it is a module: the tensors of its state_dict by their names there, tied ones under each. They are the module's own parameters
        and buffers, those of `spread` and `whole`; None stands for what a hook has made of them."""
        return {}

    def spread(self) -> dict[Tensor, Whole]:
        """The modules' tensors for the parameters that `sizes` names, and what each of these parameters is as a whole."""
        return {}

    def shared(self) -> Any:
        """What is the same on all ranks."""
        return None

    def load_shared(self, state: Any) -> None:
        """Take `shared` back."""


def named_tensors(state: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    """See `Part.named`. `state` is a state_dict with `keep_vars`, and `own` the module's own tensors by their paths: hooks may rename
    tensors, or put a copy, such as one on another device, in the place of one."""
    known = set(own.values())
    return {
        name: tensor if tensor in known else own.get(name)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor) and name.rpartition(".")[2] != _EXTRA_STATE
    }


def detached(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in named.items()}


def span_of(piece: ParameterSlice) -> Span:
    return Span(piece.name, piece.start, piece.stop)


def spans_of(pieces: Iterable[ParameterSlice]) -> list[Span]:
    return [span_of(piece) for piece in pieces if piece.numel]


def own_state(state: Mapping[str, Any], like: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """A copy of an optimizer's state of one parameter, on the device where the optimizer needs it: tensors with dimensions go to the
    parameter's. `dtype` is that of the parameter when the state was kept: tensors with dimensions that had it get the parameter's."""

    def copied(value: Tensor) -> Tensor:
        if not value.dim():
            return value.clone()
        return value.to(like.device, like.dtype if value.dtype == dtype else value.dtype, copy=True)

    return {key: copied(value) if isinstance(value, Tensor) else value for key, value in state.items()}
