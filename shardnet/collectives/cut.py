"""`Cut`: how a block is cut into chunks."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes of a block's chunks, in elements; the same on all ranks.

    Across nodes the first chunk of a block is small enough to be sent before its receiver has announced the collective. Where chunks are
    passed on inside the node, the last ones are small: no later chunk overlaps with the time that it takes to pass on the last one.
    """

    step: int  # the largest chunk
    first: int  # the first one
    least: int  # the size to which the last ones shrink: each is half of what is left

    @classmethod
    def whole(cls, step: int) -> "Cut":
        """Chunks of one size."""
        return cls(step, step, step)

    def size(self, start: int, length: int) -> int:
        """The size of the chunk at `start` in a block of `length` elements."""
        left = length - start
        return min(self.step if start else self.first, max(self.least, left // 2), left)

    def slices(self, length: int) -> Iterator[slice]:
        """The chunks of a block, first to last."""
        start = 0
        while start < length:
            size = self.size(start, length)
            yield slice(start, start + size)
            start += size
