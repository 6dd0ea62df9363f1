"""Optimizer state in three forms: a rank's own, all ranks' joined, and cut for a rank again.

[Note: consolidated state] The consolidated form is what the wrapped class would have saved in one process, so plain torch
loads it, and so does a ZeroOptimizer of any world size. State in the parameter's shape is cut and joined along the flat
parameter; everything else, such as a step counter, is the same on all ranks that hold a piece.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shardnet.errors import SizeMismatchError, UsageError
from shardnet.sharding import ParameterSlice
from shardnet.zero.codec import State
from shardnet.zero.split import Split

Tensor = torch.Tensor
SHARD_KEY = "shard"  # key in a state dict: says which part of the state it is


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of an optimizer's state a rank's state dict holds."""

    rank: int
    world_size: int
    split: Split
    slices: tuple[ParameterSlice, ...]  # by the parameter's number in the state dict

    def to_plain(self) -> dict[str, Any]:
        """As lists, numbers and text, which `torch.load` takes without executing anything."""
        slices = [{**asdict(piece), "shape": list(piece.shape)} for piece in self.slices]
        return {"rank": self.rank, "world_size": self.world_size, "split": self.split.value, "slices": slices}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "Shard":
        slices = tuple(ParameterSlice(**{**piece, "shape": tuple(piece["shape"])}) for piece in plain["slices"])
        return cls(plain["rank"], plain["world_size"], Split(plain["split"]), slices)


def merge_state_dicts(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the state dicts of all ranks together; no traffic, and no cluster is needed.

    Takes what `ZeroOptimizer.state_dict()` returned on every rank, in any order, and returns what
    `consolidated_state_dict()` would have: see [Note: consolidated state]. Raises UsageError unless there is exactly one
    from each rank of one optimizer.
    """
    if not shards or any(SHARD_KEY not in shard for shard in shards):
        raise UsageError("merge_state_dicts() needs the state dicts that ZeroOptimizer.state_dict() returned, one from each rank")
    found = sorted(((Shard.from_plain(shard[SHARD_KEY]), shard) for shard in shards), key=lambda entry: entry[0].rank)
    first = found[0][0]
    ranks = [place.rank for place, _ in found]
    if ranks != list(range(first.world_size)):
        raise UsageError(f"expected the state dicts of ranks 0 to {first.world_size - 1}, got those of {ranks}")
    if len({(place.world_size, place.split, tuple((piece.name, piece.shape) for piece in place.slices)) for place, _ in found}) > 1:
        raise UsageError("the state dicts belong to different optimizers, splits or world sizes; give those of one optimizer")
    state: dict[int, State] = {}
    for index in range(len(first.slices)):
        parts = [(place.slices[index], shard["state"][index]) for place, shard in found if index in shard["state"]]
        if parts:
            state[index] = join(parts, first.split)
    return {"state": state, "param_groups": found[0][1]["param_groups"]}


def join(parts: Sequence[tuple[ParameterSlice, State]], split: Split) -> State:
    """The state of one parameter from its pieces' states, in rank order; at least one. The tensors are copies."""
    joined: State = {}
    for key, value in parts[0][1].items():
        values = [state[key] for _, state in parts]
        if split is Split.ELEMENTS and all(_is_cut(entry, piece) for entry, (piece, _) in zip(values, parts, strict=True)):
            joined[key] = torch.cat(values).view(parts[0][0].shape)
        else:
            joined[key] = value.clone() if isinstance(value, Tensor) else value
    return joined


def cut(state: State, piece: ParameterSlice, split: Split) -> State:
    """A rank's part of one parameter's state; `piece` is not empty. The tensors are copies.

    Raises SizeMismatchError for the state of a parameter of another shape, where the difference can be seen.
    """

    def part(key: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if split is Split.ELEMENTS and piece.shape and tuple(value.shape) == piece.shape:
            value = value.reshape(-1)[piece.start : piece.stop]
        elif split is Split.ELEMENTS and value.numel() != 1:
            raise SizeMismatchError(piece.shape, tuple(value.shape), f"as the shape of {key} of {piece.name}")
        return value.clone()

    return {key: part(key, value) for key, value in state.items()}


def _is_cut(value: Any, piece: ParameterSlice) -> bool:
    """Whether a value has an entry for each element of a piece. A 0-dim parameter is never cut."""
    return isinstance(value, Tensor) and bool(piece.shape) and tuple(value.shape) == (piece.numel,)
