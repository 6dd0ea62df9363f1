"""Gathers and reductions chunk by chunk over nodes of one rank or more: direct inside a node, a ring across.

[Note: the hierarchy] To reduce, the ranks of each node give their parts of a block to the one that carries it there (route.py),
which adds them up; the sums travel around the ring of nodes, from the one behind the owner's to the owner's, and grow by each
node's own. To gather, a block travels the same way from its owner, and each carrier passes it on to the others of its node
as it comes. An all-reduce is both: a chunk whose sum is complete starts its second lap at once. So the link of a node carries
(M − 1)/M of the data a lap, which is the least possible for M nodes, however many ranks share the link, and all of them use it;
and inside a node what everyone gets is sent once where memory is shared. With nodes of one rank this is the ring of Patarasuk & Yuan
("Bandwidth optimal all-reduce algorithms", 2009), and on one node everyone sends to everyone.

The order of a sum follows from the owner of its block and from which ranks are a node: the node behind the owner's first, the
owner's last, and the same way within each, with its carrier last. 16-bit floats are added in rank order within a node,
and the sums that go on from there are not rounded: they are float32.

Nothing here waits before it takes a chunk, so nothing can lock up. What goes to this node and what goes to the next
one waits in a lane of its own: a slow link does not hold up the node, whose ranks have to feed theirs. What cannot go yet is
queued, at most the data of one lap. Blocks that are gathered are numbered N + b on the wire.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from shardnet.collectives.lane import Lane, Outgoing
from shardnet.collectives.operation import Operation
from shardnet.collectives.reduction import Array, Reduction, as_bytes, copy_bytes
from shardnet.collectives.route import Leg, Route
from shardnet.errors import ProtocolError, ShardnetError
from shardnet.wire import Buffer, Chunk

Bounds = list[tuple[int, int]]  # first element and the one after the last, by rank

# A gathered chunk is passed on to the next node as the bytes that came, which saves a checksum; but at most this many
# bytes of them are kept for that, the rest is read again from the output.
MAX_HELD_BYTES = 8 * 1024 * 1024
# While so many chunks wait for the next node, the neighbours get nothing more to add up: it could go no further either, and to
# copy it takes the processor from what keeps the link busy.
_AHEAD = 3


@dataclass(slots=True)
class Hierarchical:
    """One lap or two, for one rank.

    `bounds` cuts the data into a block a rank, in elements. `source` is the whole input of a reduction. `output` is where the
    result goes: the whole data if `gather`, this rank's block else. It may be `source` itself. `shard` is this rank's block
    where a gather has yet to copy it into the output.
    """

    bounds: Bounds
    output: Array
    gather: bool
    reduction: Reduction | None = None
    source: Array | None = None
    shard: Array | None = None
    _rank: int = 0
    _size: int = 1
    _route: Route = field(init=False)
    _step: int = 1  # elements of a chunk
    _near: Lane = field(default_factory=Lane)  # to the other ranks of this node
    _far: Lane = field(default_factory=Lane)  # to the next node
    _filled: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, wire block) -> elements received
    _parts: dict[tuple[int, int], dict[int, Array]] = field(default_factory=dict)  # (block, first element) -> what came, by rank
    _held: int = 0
    _missing: int = 0  # elements still to be received
    _complete: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, op: Operation) -> None:
        """The algorithm of an operation."""
        self._rank, self._size, self._route = op.group.rank, op.group.size, op.group.route
        limits = op.group.board.limits
        largest = max(self.output.itemsize, self._sum_itemsize)
        self._step = (limits.piece_bytes if self._route.nodes == 1 else limits.chunk_bytes) // largest
        self._plan()
        op.sink = self._on_chunk
        sources, targets = self._peers(op.group.peers)
        for peer in sources:
            await op.announce(peer)
        for peer in targets:
            await op.cleared(peer)
        if self._near.unsent and self._far.unsent:
            await self._both_lanes(op)
        else:
            await self._drain(op, self._near if self._near.unsent else self._far)
        if self._missing:
            await self._complete.wait()

    # --- the plan

    @property
    def _sum_itemsize(self) -> int:
        """Of the sums that go from node to node."""
        return self.output.itemsize if self.reduction is None else self.reduction.sum_itemsize

    def _plan(self) -> None:
        """Count what will come and go, and queue what this rank begins with."""
        for block, leg in enumerate(self._route.legs):
            length = self._length(block)
            carried = leg.carrier == self._rank
            if self.source is not None:
                self._missing += length * self._awaited(leg) * carried
                self._near.unsent += length * (not carried)
                self._far.unsent += length * (carried and leg.hops > 0)
            if self.gather:
                self._missing += length * (block != self._rank)
                self._near.unsent += length * (carried and bool(self._route.neighbours))
                self._far.unsent += length * (carried and leg.hops < self._route.nodes - 1)
        if self.source is not None:
            self._far.at_first = self._sums_of_one()
            self._near.at_last = self._contributions()
            self._near.may_run_ahead = lambda: self._far.queued < _AHEAD
        elif self.gather:
            own = self._own_output() if self.shard is None else self.shard
            for chunk in self._chunks(len(own)):
                self._spread(self._rank, chunk, own[chunk])

    def _awaited(self, leg: Leg) -> int:
        """How many ranks add to each chunk of a block that this rank carries: its neighbours, and the node before if there is one."""
        return len(self._route.neighbours) + (self._route.nodes > 1 and leg.hops != 1)

    def _sums_of_one(self) -> Iterator[Outgoing]:
        """What a node of one rank begins with: its sum is its own part, which is widened only when it goes."""
        assert self.source is not None
        assert self.reduction is not None
        for block, leg in enumerate(self._route.legs):
            if leg.carrier == self._rank and not self._awaited(leg):
                own = self.source[slice(*self.bounds[block])]
                for chunk in self._chunks(len(own)):
                    yield Outgoing((leg.behind,), block, chunk.start * self._sum_itemsize, self.reduction.widen(own[chunk]))

    def _contributions(self) -> Iterator[Outgoing]:
        """What the neighbours are to add up: the first chunk of every block, then the second ones, so that all can begin at once;
        and those first that have the longest way to go."""
        assert self.source is not None
        others = [(leg, block) for block, leg in enumerate(self._route.legs) if leg.carrier != self._rank]
        turn = {peer: index for index, peer in enumerate(self._route.neighbours)}
        others.sort(key=lambda entry: ((entry[0].hops - 1) % self._route.nodes, turn[entry[0].carrier], entry[1]))
        for chunk in self._chunks(max(self._length(block) for _, block in others) if others else 0):
            for leg, block in others:
                place = slice(chunk.start, min(chunk.stop, self._length(block)))
                if place.start < place.stop:
                    part = self.source[slice(*self.bounds[block])][place]
                    yield Outgoing((leg.carrier,), block, place.start * part.itemsize, part)

    def _chunks(self, length: int) -> Iterator[slice]:
        return (slice(first, min(first + self._step, length)) for first in range(0, length, self._step))

    def _length(self, block: int) -> int:
        start, end = self.bounds[block]
        return end - start

    def _own_output(self) -> Array:
        """This rank's block of the output, which is no more than that without a gather."""
        return self.output[slice(*self.bounds[self._rank])] if self.gather else self.output

    def _peers(self, everyone: list[int]) -> tuple[list[int], list[int]]:
        """Who must know that their data may come, and whose word this rank waits for.

        Where each block has something in it, who has received what it waits for knows that all ranks are there, as [Note: no rank
        ends before all have entered] asks for. Where one is empty (in a broadcast all but one are) it would not: then
        everyone announces to everyone.
        """
        if not all(end > start for start, end in self.bounds):
            return everyone, everyone
        sources, targets = set(self._route.neighbours), set(self._route.neighbours)
        for leg in self._route.legs:
            if leg.carrier == self._rank and self._route.nodes > 1:
                if (self.source is not None and leg.hops != 1) or (self.gather and leg.hops != 0):
                    sources.add(leg.before)
                if (self.source is not None and leg.hops != 0) or (self.gather and leg.hops != self._route.nodes - 1):
                    targets.add(leg.behind)
        return [peer for peer in everyone if peer in sources], [peer for peer in everyone if peer in targets]

    # --- sending

    async def _both_lanes(self, op: Operation) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._drain(op, self._far))  # first: it may take far longer
                group.create_task(self._drain(op, self._near))
        except ExceptionGroup as several:
            raise next((error for error in several.exceptions if isinstance(error, ShardnetError)), several.exceptions[0]) from None

    async def _drain(self, op: Operation, lane: Lane) -> None:
        while lane.unsent:
            item = await lane.take()
            lane.unsent -= len(item.data)
            self._near.wake()
            if item.frame is not None:
                self._held -= len(item.frame)
            await op.send_all(item.peers, item.block, item.offset, as_bytes(item.data), frame=item.frame)
            if item.copy_to is not None:
                copy_bytes(as_bytes(item.data), item.copy_to)
            await asyncio.sleep(0)  # sending may not wait for anything, and what arrives in the meantime is to be added

    def _spread(self, block: int, place: slice, data: Array, frame: Buffer | None = None) -> None:
        """Queue a gathered chunk for the neighbours and for the next node."""
        leg, wire_block, offset = self._route.legs[block], self._size + block, place.start * data.itemsize
        copy_to = self._own_output()[place] if self.shard is not None and block == self._rank else None
        if self._route.neighbours:
            self._near.then.append(Outgoing(self._route.neighbours, wire_block, offset, data, copy_to=copy_to))
            self._near.wake()
            copy_to = None
        if leg.hops < self._route.nodes - 1:
            keep = frame is not None and self._held + len(frame) <= MAX_HELD_BYTES
            if keep and frame is not None:
                self._held += len(frame)
            self._far.then.append(Outgoing((leg.behind,), wire_block, offset, data, frame if keep else None, copy_to))
            self._far.wake()

    # --- receiving

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        block = chunk.block % self._size
        place = self._place(source, chunk, block)
        self._filled[source, chunk.block] = place.stop
        self._missing -= place.stop - place.start
        if chunk.block < self._size:
            self._add(source, chunk, block, place)
        else:
            target = self.output[slice(*self.bounds[block])][place]
            copy_bytes(chunk.data, target)
            if self._route.legs[block].carrier == self._rank:
                self._spread(block, place, target, chunk.frame)
        if not self._missing:
            self._complete.set()

    def _place(self, source: int, chunk: Chunk, block: int) -> slice:
        """Which elements of its block a chunk has. Raises ProtocolError if it is not the next one to come from there."""
        leg, itemsize = self._route.legs[block], self.output.itemsize
        carried = leg.carrier == self._rank
        if chunk.block < self._size:
            across = source == leg.before and self._route.nodes > 1 and leg.hops != 1
            itemsize = self._sum_itemsize if across else itemsize
            welcome = self.source is not None and carried and (across or source in self._route.neighbours)
        else:
            welcome = self.gather and chunk.block < 2 * self._size and block != self._rank
            welcome = welcome and source == (leg.before if carried else leg.carrier)
        filled = self._filled.get((source, chunk.block), 0)
        more, rest = divmod(len(chunk.data), itemsize)
        if not welcome or rest or chunk.offset != filled * itemsize or filled + more > self._length(block):
            what = f"{len(chunk.data)} bytes of block {chunk.block} at {chunk.offset}"
            raise ProtocolError(f"rank {source} sent {what}, expected offset {filled * itemsize}")
        return slice(filled, filled + more)

    def _add(self, source: int, chunk: Chunk, block: int, place: slice) -> None:
        """Keep what is to be added (without a frame it is lent for this call only), or add all up if it is the last one."""
        assert self.source is not None
        assert self.reduction is not None
        leg, near = self._route.legs[block], source in self._route.neighbours
        parts = self._parts.setdefault((block, place.start), {})
        parts[source] = self.reduction.view(chunk.data) if near else self.reduction.view_sum(chunk.data)
        if len(parts) < self._awaited(leg):
            if chunk.frame is None:
                parts[source] = np.copy(parts[source])
            return
        if len({len(part) for part in parts.values()}) > 1:
            raise ProtocolError(f"rank {source} cut its part of block {block} in another way than the others: Limits differ")
        del self._parts[block, place.start]
        parts[self._rank] = self.source[slice(*self.bounds[block])][place]
        before = parts.get(leg.before) if leg.before not in self._route.node else None
        node = sorted(self._route.node) if self.reduction.widens else self._route.node
        if leg.hops == 0:
            target = self._own_output()[place]
            self.reduction.reduce([parts[rank] for rank in node], target, before=before)
            if self.gather:
                self._spread(block, place, target)
        else:
            total = self.reduction.sum([parts[rank] for rank in node], before=before)
            self._far.first.append(Outgoing((leg.behind,), block, place.start * total.itemsize, total))
            self._far.wake()
