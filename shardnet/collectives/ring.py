"""The ring: every rank sends to its right neighbour only, chunk by chunk.

[Note: ring order] The data has one block a rank. To reduce, block b starts at rank b + 1, travels to the right and
grows by each rank's own contribution until it ends, complete, at rank b: so it is summed in the order b + 1, b + 2,
…, b, whatever the timing. To gather, rank r's block travels from r to the right until everyone has it. An
all-reduce is both: a chunk that is complete starts its second lap at once. Each rank sends (N − 1)/N of the data a
lap, which is the least possible (Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms").

Blocks of a gathering lap are numbered N + b on the wire. Nothing here waits before it takes a chunk, so the ring
cannot lock up: what cannot be sent on yet is queued, at most the data of one lap.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field

from shardnet.collectives.operation import Operation
from shardnet.collectives.reduction import Array, Reduction, as_bytes
from shardnet.errors import ProtocolError
from shardnet.wire import Buffer, Chunk

Bounds = list[tuple[int, int]]  # first element and the one after the last, by rank

# A forwarded chunk is passed on as the bytes that came, which saves a checksum; but at most this many bytes
# of them are kept for that, the rest is read again from the output.
MAX_HELD_BYTES = 8 * 1024 * 1024


@dataclass(slots=True)
class _Outgoing:
    block: int
    offset: int  # bytes
    data: Array
    frame: Buffer | None = None


@dataclass(slots=True)
class Ring:
    """One lap or two around the ring, for one rank.

    `bounds` cuts the data into blocks, in elements. `source` is the whole input of a reduction. `output` is where the
    result goes: the whole data if `gather`, this rank's block else. It may be `source` itself.
    """

    bounds: Bounds
    output: Array
    gather: bool
    reduction: Reduction | None = None
    source: Array | None = None
    _rank: int = 0
    _size: int = 1
    _outgoing: deque[_Outgoing] = field(default_factory=deque)
    _unsent: int = 0  # bytes still to be sent
    _missing: int = 0  # bytes still to be received
    _held: int = 0
    _filled: dict[int, int] = field(default_factory=dict)  # wire block -> bytes received
    _event: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, op: Operation) -> None:
        """The algorithm of a ring operation."""
        self._rank, self._size = op.group.rank, op.group.size
        left, right = (self._rank - 1) % self._size, (self._rank + 1) % self._size
        self._plan(left, right, op.group.board.limits.chunk_bytes)
        op.sink = self._on_chunk
        await op.announce(left)
        await op.cleared(right)
        while self._unsent or self._missing:
            if not self._outgoing:
                self._event.clear()
                await self._event.wait()
                continue
            item = self._outgoing.popleft()
            self._unsent -= item.data.nbytes
            if item.frame is not None:
                self._held -= len(item.frame)
            await op.send(right, item.block, item.offset, as_bytes(item.data), frame=item.frame)

    def _plan(self, left: int, right: int, chunk_bytes: int) -> None:
        """Count what will come and go, and queue what this rank begins with."""
        itemsize = self.output.itemsize
        sizes = [(end - start) * itemsize for start, end in self.bounds]
        total = sum(sizes)
        if self.source is not None:
            self._unsent += total - sizes[self._rank]
            self._missing += total - sizes[left]
            self._queue_block(left, self.source[slice(*self.bounds[left])], chunk_bytes)
        if self.gather:
            self._unsent += total - sizes[right]
            self._missing += total - sizes[self._rank]
            if self.source is None:
                self._queue_block(self._size + self._rank, self.output[slice(*self.bounds[self._rank])], chunk_bytes)

    def _queue_block(self, block: int, values: Array, chunk_bytes: int) -> None:
        step = chunk_bytes // values.itemsize
        for first in range(0, len(values), step):
            self._outgoing.append(_Outgoing(block, first * values.itemsize, values[first : first + step]))

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        size = len(chunk.data)
        owner = chunk.block % self._size
        start, end = self.bounds[owner]
        filled = self._filled.get(chunk.block, 0)
        itemsize = self.output.itemsize
        reducing = chunk.block < self._size
        if reducing:  # all blocks but the one that begins here
            welcome = self.source is not None and owner != (self._rank - 1) % self._size
        else:  # all blocks but this rank's own
            welcome = self.gather and chunk.block < 2 * self._size and owner != self._rank
        if not welcome or chunk.offset != filled or filled + size > (end - start) * itemsize or size % itemsize:
            raise ProtocolError(f"rank {source} sent {size} bytes of block {chunk.block} at {chunk.offset}, expected offset {filled}")
        self._filled[chunk.block] = filled + size
        self._missing -= size
        place = slice(start + filled // itemsize, start + (filled + size) // itemsize)
        if reducing:
            self._reduce(chunk, owner, place)
        else:
            self._store(chunk, owner, place)
        self._event.set()

    def _reduce(self, chunk: Chunk, owner: int, place: slice) -> None:
        assert self.source is not None
        assert self.reduction is not None
        incoming, mine = self.reduction.view(chunk.data), self.source[place]
        if owner != self._rank:
            self._outgoing.append(_Outgoing(chunk.block, chunk.offset, self.reduction.combine(incoming, mine)))
            return
        first = 0 if self.gather else self.bounds[owner][0]
        target = self.output[place.start - first : place.stop - first]
        self.reduction.finish(self.reduction.combine(incoming, mine, out=target), target)
        if self.gather:
            self._outgoing.append(_Outgoing(self._size + owner, chunk.offset, target))

    def _store(self, chunk: Chunk, owner: int, place: slice) -> None:
        target = self.output[place]
        as_bytes(target)[:] = chunk.data
        if owner == (self._rank + 1) % self._size:
            return  # it came from there: the lap is over
        keep = chunk.frame is not None and self._held + len(chunk.frame) <= MAX_HELD_BYTES
        if keep and chunk.frame is not None:
            self._held += len(chunk.frame)
        self._outgoing.append(_Outgoing(chunk.block, chunk.offset, target, chunk.frame if keep else None))
