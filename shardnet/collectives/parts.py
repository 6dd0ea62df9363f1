"""What ranks contribute to a sum, part of which may still be where they have it, in pieces."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from shardnet.collectives.reduction import Array, is_overwritten
from shardnet.wire import Lent

# What is lent is read in pieces of this size just before it is added, so that it comes out of the cache then.
PIECE_BYTES = 1024 * 1024


class Pieces:
    """Arrays of this rank, 1-D and of one dtype, that are taken for one: as if they were end to end."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self.arrays = [array for array in arrays if array.size]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    def cut(self, start: int, end: int) -> "Pieces":
        """These elements."""
        kept: list[Array] = []
        for array in self.arrays:
            kept.append(array[start:end])
            start, end = max(start - len(array), 0), max(end - len(array), 0)
        return Pieces(kept)

    def put_together(self, start: int, end: int, scratch: Array) -> Array:
        """These elements in one array: the very ones, or else a copy in `scratch`."""
        first, *others = self.cut(start, end).arrays
        return np.concatenate([first, *others], out=scratch[: end - start]) if others else first


Part = Array | Pieces | Lent


def piecewise(
    parts: Sequence[Part], before: Part | None, out: Array, dtype: "np.dtype[np.generic]"
) -> Iterator[tuple[slice, Iterator[Array], Array | None]]:
    """Which elements, those of all parts, to be summed up into those of `out`, and those of the sum `before`. What is lent is read when its
    turn comes, and all but the first part is gone with the next one: so it is still in the cache. Raises LoanRevoked.

    All have the same number of elements, the parts' of this dtype. The sum is not lent. `out` may be one of the parts, but for pieces.
    """
    assert before is None or isinstance(before, np.ndarray)
    step = length = max(count(part, dtype.itemsize) for part in parts)
    scratch: list[Array] = []  # for the first part, and for all others
    if any(not isinstance(part, np.ndarray) for part in parts):
        step = min(length, PIECE_BYTES // dtype.itemsize)
        scratch = [np.empty(step, dtype) for _ in parts[:2]]
    for start in range(0, length, step):
        piece = slice(start, min(start + step, length))
        yield piece, _in_turn(parts, piece, out, scratch), None if before is None else before[piece]


def count(part: Part, itemsize: int) -> int:
    """Elements."""
    return len(part) if isinstance(part, np.ndarray | Pieces) else part.size // itemsize


def _in_turn(parts: Sequence[Part], piece: slice, out: Array, scratch: Sequence[Array]) -> Iterator[Array]:
    here = {place: part for place, part in enumerate(parts) if isinstance(part, np.ndarray)}
    spared = {place: part[piece].copy() for place, part in here.items() if is_overwritten(place, part, out)}
    for place, part in enumerate(parts):
        if isinstance(part, np.ndarray):
            yield spared.get(place, part[piece])
        elif isinstance(part, Pieces):
            yield part.put_together(piece.start, piece.stop, scratch[min(place, 1)])
        else:
            target = scratch[min(place, 1)][: piece.stop - piece.start]
            part.read(piece.start * target.itemsize, target)
            yield target
