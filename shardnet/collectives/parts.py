"""What ranks contribute to a sum, part of which may still be where they have it."""

from collections.abc import Iterator, Sequence

import numpy as np

from shardnet.collectives.reduction import Array
from shardnet.wire import Lent

Part = Array | Lent
# What is lent is read in pieces of this size just before it is added, so that it comes out of the cache then.
_PIECE_BYTES = 512 * 1024


def piecewise(
    parts: Sequence[Part], before: Part | None, dtype: "np.dtype[np.generic]"
) -> Iterator[tuple[slice, list[Array], Array | None]]:
    """Which elements, and those of all parts and of the sum `before`; arrays are good until the next piece. Raises LoanRevoked.

    All have the same number of elements, the parts' of this dtype. The sum is not lent.
    """
    assert before is None or isinstance(before, np.ndarray)
    length = max(count(part, dtype.itemsize) for part in parts)
    lent = [index for index, part in enumerate(parts) if not isinstance(part, np.ndarray)]
    step = _PIECE_BYTES // dtype.itemsize if lent else length
    scratch = {index: np.empty(min(step, length), dtype) for index in lent}
    for start in range(0, length, step):
        piece = slice(start, min(start + step, length))
        arrays = [_piece(part, piece, scratch.get(index)) for index, part in enumerate(parts)]
        yield piece, arrays, None if before is None else before[piece]


def count(part: Part, itemsize: int) -> int:
    """Elements."""
    return len(part) if isinstance(part, np.ndarray) else part.size // itemsize


def _piece(part: Part, piece: slice, scratch: Array | None) -> Array:
    if isinstance(part, np.ndarray):
        return part[piece]
    assert scratch is not None
    target = scratch[: piece.stop - piece.start]
    part.read(piece.start * target.itemsize, target)
    return target
