"""Direct collectives, chunk by chunk: every rank sends to every other, and nothing is passed on.

For the ranks of one node. To reduce, each block's contributions go to its owner, which adds them up in the order of a ring; to gather,
each block goes from its owner to everyone; an all-reduce is both, and a chunk whose sum is complete starts on its way back at
once. As many bytes arrive as around a ring, but what everyone gets is sent once where ranks share memory, and no rank waits
for a chain of others. Across nodes a ring is better: there each link would carry several streams at a time.

Blocks that are gathered are numbered N + b on the wire. Contributions are sent row by row, the first chunk of every block,
then the second ones, so that all owners add at the same time.
"""

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shardnet.collectives.operation import Operation
from shardnet.collectives.reduction import Array, Reduction, as_bytes, copy_bytes
from shardnet.collectives.ring import Bounds
from shardnet.errors import ProtocolError
from shardnet.wire import Chunk

_Contribution = tuple[int, slice]  # a peer, and which elements of its block


@dataclass(slots=True)
class Direct:
    """One rank's part; the arguments are those of a `Ring`.

    `shard` is this rank's block where a gather has yet to copy it into the output.
    """

    bounds: Bounds
    output: Array
    gather: bool
    reduction: Reduction | None = None
    source: Array | None = None
    shard: Array | None = None
    _rank: int = 0
    _size: int = 1
    _step: int = 1  # elements of a chunk, which may be larger here than on a ring
    _filled: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, wire block) -> bytes received
    _parts: dict[int, dict[int, Array]] = field(default_factory=dict)  # first element -> what came for that chunk, by rank
    _complete: deque[slice] = field(default_factory=deque)  # chunks of this rank's block that everyone is to get
    _unsent: int = 0  # elements of this rank's block that are still to go to everyone
    _missing: int = 0  # elements still to be received
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, op: Operation) -> None:
        """The algorithm of an operation."""
        self._rank, self._size = op.group.rank, op.group.size
        self._plan(op)
        op.sink = self._on_chunk
        for peer in op.group.peers:
            await op.announce(peer)
        for peer in op.group.peers:
            await op.cleared(peer)
        contributions = self._contributions(op.group.peers)
        while True:
            if self._complete:
                chunk = self._complete.popleft()
                self._unsent -= chunk.stop - chunk.start
                own = self._own_output() if self.shard is None else self.shard
                await op.send_all(self._size + self._rank, *self._cut(own, chunk))
                if self.shard is not None:  # only now: it is in the cache, and the others have something to do
                    np.copyto(self._own_output()[chunk], self.shard[chunk])
            elif (contribution := next(contributions, None)) is not None:
                peer, chunk = contribution
                assert self.source is not None
                offset, data = self._cut(self.source[slice(*self.bounds[peer])], chunk)
                await op.send(peer, peer, offset, data)
            elif self._unsent or self._missing:
                self._changed.clear()
                await self._changed.wait()
            else:
                return
            await asyncio.sleep(0)  # sending may not wait for anything, and what arrives in the meantime is to be added

    def _plan(self, op: Operation) -> None:
        """Count what will come and go, and queue what this rank begins with."""
        self._step = op.group.board.limits.piece_bytes // self.output.itemsize
        own, total = _length(self.bounds[self._rank]), sum(map(_length, self.bounds))
        if self.source is not None:
            self._missing += own * (self._size - 1)
        if self.gather:
            self._missing += total - own
            self._unsent = own
            if self.source is None:
                self._complete.extend(self._chunks(own))

    def _contributions(self, peers: list[int]) -> Iterator[_Contribution]:
        if self.source is None:
            return
        for chunk in self._chunks(max(map(_length, self.bounds))):
            for peer in peers:
                end = min(chunk.stop, _length(self.bounds[peer]))
                if chunk.start < end:
                    yield peer, slice(chunk.start, end)

    def _chunks(self, length: int) -> Iterator[slice]:
        return (slice(first, min(first + self._step, length)) for first in range(0, length, self._step))

    def _own_output(self) -> Array:
        """This rank's block of the output, which is no more than that without a gather."""
        return self.output[slice(*self.bounds[self._rank])] if self.gather else self.output

    @staticmethod
    def _cut(block: Array, chunk: slice) -> tuple[int, memoryview]:
        """Offset and bytes of a chunk of a block."""
        return chunk.start * block.itemsize, as_bytes(block[chunk])

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        gathered = self.gather and chunk.block == self._size + source
        contributed = self.source is not None and chunk.block == self._rank
        size, itemsize = len(chunk.data), self.output.itemsize
        start, end = self.bounds[source if gathered else self._rank]
        filled = self._filled.get((source, chunk.block), 0)
        if not (gathered or contributed) or chunk.offset != filled or filled + size > (end - start) * itemsize or size % itemsize:
            raise ProtocolError(f"rank {source} sent {size} bytes of block {chunk.block} at {chunk.offset}, expected offset {filled}")
        self._filled[source, chunk.block] = filled + size
        place = slice(filled // itemsize, (filled + size) // itemsize)
        self._missing -= place.stop - place.start
        if gathered:
            copy_bytes(chunk.data, self.output[start:end][place])
        else:
            self._add(source, chunk, place)
        self._changed.set()

    def _add(self, source: int, chunk: Chunk, place: slice) -> None:
        """Keep a contribution, which is lent for this call only, or add all up if it is the last one."""
        assert self.reduction is not None
        assert self.source is not None
        parts = self._parts.setdefault(place.start, {})
        parts[source] = self.reduction.view(chunk.data)
        if len(parts) < self._size - 1:
            parts[source] = np.copy(parts[source])
            return
        if len({len(part) for part in parts.values()}) > 1:
            raise ProtocolError(f"rank {source} cut its contribution in another way than the others: Limits differ")
        del self._parts[place.start]
        parts[self._rank] = self.source[slice(*self.bounds[self._rank])][place]
        first = 0 if self.reduction.widens else self._rank + 1  # the order of other algorithms for this dtype: the same bits
        self.reduction.reduce([parts[(first + step) % self._size] for step in range(self._size)], self._own_output()[place])
        if self.gather:
            self._complete.append(place)


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]
