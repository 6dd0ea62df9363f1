"""`Cut`: how a block is cut into chunks."""

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """The same on all ranks. In elements.

    Across nodes a block begins with a chunk that may go before its receiver is heard of, and the last chunks are small where they are
    passed on inside the node: behind the last one nothing hides what it takes to pass it on.
    """

    step: int  # the largest chunk
    first: int  # the first one
    least: int  # to which the last ones shrink: each is half of what is left

    @classmethod
    def whole(cls, step: int) -> "Cut":
        """Chunks of one size."""
        return cls(step, step, step)

    def size(self, start: int, length: int) -> int:
        """Of the chunk at `start` in a block."""
        left = length - start
        return min(self.step if start else self.first, max(self.least, left // 2), left)

    def slices(self, length: int) -> Iterator[slice]:
        """The chunks of a block, first to last."""
        start = 0
        while start < length:
            size = self.size(start, length)
            yield slice(start, start + size)
            start += size
