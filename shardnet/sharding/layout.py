"""`FlatLayout`: where each parameter lies in a flat buffer, and which part of it each rank holds.

[Note: flat layout] The parameters of a group lie end to end, in order, in one flat buffer of N elements, without
gaps or padding. The buffer is cut into `world_size` contiguous shards of N // world_size elements, the first
N % world_size of them one longer, or into shards of given sizes. So the shards put end to end are the flat buffer,
which is what all_gather delivers, and a rank's part of a parameter is one contiguous slice: all of it, a piece, or
nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod

import torch

from shardnet.errors import InvalidRankError, SizeMismatchError
from shardnet.sharding.split import shard_sizes

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter in the flat buffer."""

    name: str
    shape: tuple[int, ...]
    offset: int  # of its first element in the flat buffer

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The elements [start, stop) of a flattened parameter that one rank holds; empty where start == stop."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    offset: int  # of element `start` in the rank's shard

    @property
    def numel(self) -> int:
        return self.stop - self.start


class FlatLayout:
    """The parameters of one flat buffer and its split over ranks. See [Note: flat layout]. Immutable.

    `sizes` are the elements of each rank's shard; without them the split is balanced.
    """

    def __init__(self, named_shapes: Sequence[tuple[str, Sequence[int]]], world_size: int, *, sizes: Sequence[int] | None = None) -> None:
        specs: list[ParameterSpec] = []
        offset = 0
        for name, shape in named_shapes:
            specs.append(ParameterSpec(name, tuple(shape), offset))
            offset += specs[-1].numel
        self.specs = tuple(specs)
        self.world_size = world_size
        self.numel = offset  # N
        self.sizes = shard_sizes(offset, world_size) if sizes is None else tuple(sizes)
        if len(self.sizes) != world_size or sum(self.sizes) != offset:
            raise SizeMismatchError(f"{world_size} sizes that sum to {offset}", self.sizes, "as the shards' sizes")
        self._slices: dict[int, tuple[ParameterSlice, ...]] = {}  # by rank, made when first asked for

    @property
    def digest(self) -> str:
        """Equal for layouts of the same names and shapes."""
        return blake2b(repr(self.specs).encode(), digest_size=4).hexdigest()

    def bounds(self, rank: int) -> tuple[int, int]:
        """Start and stop of `rank`'s shard in the flat buffer."""
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(rank, self.world_size)
        start = sum(self.sizes[:rank])
        return start, start + self.sizes[rank]

    def slices(self, rank: int) -> tuple[ParameterSlice, ...]:
        """One slice per parameter, in order."""
        if rank not in self._slices:
            self._slices[rank] = tuple(self._slice(spec, *self.bounds(rank)) for spec in self.specs)
        return self._slices[rank]

    def views(self, flat: Tensor) -> list[Tensor]:
        """A flat buffer [N] as the parameters it holds, each in its shape and sharing the buffer's memory."""
        self._check(flat, self.numel)
        pieces = flat.split_with_sizes([spec.numel for spec in self.specs])
        return [piece.view(spec.shape) for spec, piece in zip(self.specs, pieces, strict=True)]

    def shard(self, flat: Tensor, rank: int) -> Tensor:
        """`rank`'s part of a flat buffer [N], as a view [sizes[rank]]."""
        self._check(flat, self.numel)
        start, stop = self.bounds(rank)
        return flat[start:stop]

    def shard_views(self, shard: Tensor, rank: int) -> list[Tensor]:
        """A shard [sizes[rank]] as one 1-D view per parameter, possibly empty."""
        self._check(shard, self.sizes[rank])
        return list(shard.split_with_sizes([piece.numel for piece in self.slices(rank)]))

    def _slice(self, spec: ParameterSpec, shard_start: int, shard_stop: int) -> ParameterSlice:
        start = min(max(shard_start - spec.offset, 0), spec.numel)
        stop = max(min(shard_stop - spec.offset, spec.numel), start)
        offset = min(max(spec.offset - shard_start, 0), shard_stop - shard_start)
        return ParameterSlice(spec.name, spec.shape, start, stop, offset)

    def _check(self, buffer: Tensor, numel: int) -> None:
        if buffer.dim() != 1 or buffer.numel() != numel:
            raise SizeMismatchError((numel,), tuple(buffer.shape), "as the flat buffer's shape")
