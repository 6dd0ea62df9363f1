"""What one rank owns of a `ZeroOptimizer`, and how another one, of any world size, takes it back."""

from collections.abc import Iterator, Mapping

import torch

from shardnet.sharding import ParameterSlice
from shardnet.zero.codec import State
from shardnet.zero.optimizer import ZeroOptimizer

Tensor = torch.Tensor


def all_slices(optimizer: ZeroOptimizer) -> list[ParameterSlice]:
    """This rank's slice of each parameter, empty ones too."""
    return list(optimizer._sharded.slices.values())


def named_parameters(optimizer: ZeroOptimizer) -> dict[Tensor, ParameterSlice]:
    """The module's own parameters, with this rank's slice of each."""
    return dict(optimizer._sharded.slices)


def owned(optimizer: ZeroOptimizer) -> Iterator[tuple[ParameterSlice, Tensor, State]]:
    """Each piece of this rank with its values and its state, both the optimizer's own."""
    optimizer.wait()
    inner = optimizer._require_inner()
    for parameter, piece in optimizer._sharded.pieces.items():
        yield optimizer._sharded.slices[parameter], piece.detach(), inner.state.get(piece, {})


@torch.no_grad()
def replace_owned(optimizer: ZeroOptimizer, found: Mapping[str, tuple[Tensor, State]]) -> None:
    """Give this rank's pieces other values and state, by the parameters' names, and gather the parameters. A collective."""
    optimizer.wait()
    inner = optimizer._require_inner()
    for parameter, piece in optimizer._sharded.pieces.items():
        name = optimizer._sharded.slices[parameter].name
        if name in found:
            values, state = found[name]
            piece.copy_(values.view(piece.shape))
            inner.state[piece] = optimizer.state[parameter] = state
    optimizer._start_gathers(optimizer._sharded.buckets)
    optimizer.wait()
