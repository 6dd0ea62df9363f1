"""What ranks contribute to a sum, part of which may still be where they have it."""

from collections.abc import Iterator, Sequence

import numpy as np

from shardnet.collectives.reduction import Array, is_overwritten
from shardnet.wire import Lent

Part = Array | Lent
# What is lent is read in pieces of this size just before it is added, so that it comes out of the cache then.
_PIECE_BYTES = 512 * 1024


def piecewise(
    parts: Sequence[Part], before: Part | None, out: Array, dtype: "np.dtype[np.generic]"
) -> Iterator[tuple[slice, Iterator[Array], Array | None]]:
    """Which elements, those of all parts, to be summed up into those of `out`, and those of the sum `before`. What is lent is read when its
    turn comes, and all but the first part is gone with the next one: so it is still in the cache. Raises LoanRevoked.

    All have the same number of elements, the parts' of this dtype. The sum is not lent. `out` may be one of the parts.
    """
    assert before is None or isinstance(before, np.ndarray)
    step = length = max(count(part, dtype.itemsize) for part in parts)
    scratch: list[Array] = []  # for the first part, and for all others
    if any(not isinstance(part, np.ndarray) for part in parts):
        step = min(length, _PIECE_BYTES // dtype.itemsize)
        scratch = [np.empty(step, dtype) for _ in parts[:2]]
    for start in range(0, length, step):
        piece = slice(start, min(start + step, length))
        yield piece, _in_turn(parts, piece, out, scratch), None if before is None else before[piece]


def count(part: Part, itemsize: int) -> int:
    """Elements."""
    return len(part) if isinstance(part, np.ndarray) else part.size // itemsize


def _in_turn(parts: Sequence[Part], piece: slice, out: Array, scratch: Sequence[Array]) -> Iterator[Array]:
    here = {place: part for place, part in enumerate(parts) if isinstance(part, np.ndarray)}
    spared = {place: part[piece].copy() for place, part in here.items() if is_overwritten(place, part, out)}
    for place, part in enumerate(parts):
        if isinstance(part, np.ndarray):
            yield spared.get(place, part[piece])
        else:
            target = scratch[min(place, 1)][: piece.stop - piece.start]
            part.read(piece.start * target.itemsize, target)
            yield target
