"""What ranks contribute to a sum. Some of it may still lie in their memory, and it may be in pieces."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from shardnet.collectives.reduction import Array, is_overwritten
from shardnet.wire import Lent

# Lent data is read in pieces of this size just before it is added, so that the addition finds it in the cache.
PIECE_BYTES = 1024 * 1024


class Pieces:
    """Arrays of this rank, 1-D and of one dtype, that are treated as one array: as if they lay end to end."""

    def __init__(self, arrays: Iterable[Array]) -> None:
        self.arrays = [array for array in arrays if array.size]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def __len__(self) -> int:
        return sum(map(len, self.arrays))

    def cut(self, start: int, end: int) -> "Pieces":
        """Elements `start` to `end`."""
        kept: list[Array] = []
        for array in self.arrays:
            kept.append(array[start:end])
            start, end = max(start - len(array), 0), max(end - len(array), 0)
        return Pieces(kept)

    def put_together(self, start: int, end: int, scratch: Array) -> Array:
        """Elements `start` to `end` as one array: a view of them if they lie in one, otherwise a copy in `scratch`."""
        first, *others = self.cut(start, end).arrays
        return np.concatenate([first, *others], out=scratch[: end - start]) if others else first


Part = Array | Pieces | Lent


def piecewise(
    parts: Sequence[Part], before: Part | None, out: Array, dtype: "np.dtype[np.generic]"
) -> Iterator[tuple[slice, Iterator[Array], Array | None]]:
    """Yield piece by piece: a slice of the elements, these elements of each part, which are to be summed up into `out`, and those of the
    sum `before`. A lent part is read when its turn comes, so that it is still in the cache when it is added; each part except the first
    is valid only until the next one. Raises LoanRevoked.

    All have the same number of elements, and the parts have dtype `dtype`. `before` is not lent. `out` may be one of the parts, unless that
    is in pieces.
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
    """The number of elements of a part."""
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
