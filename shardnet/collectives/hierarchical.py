"""Gathers and reductions chunk by chunk over nodes of one rank or more: direct inside a node, a ring across.

[Note: the hierarchy] To reduce, the ranks of each node give their parts of a block to the one that carries it there (route.py),
which adds them up; the sums travel around the ring of nodes, from the one behind the owner's to the owner's, and grow by each
node's own. To gather, a block travels the same way from its owner, and each carrier passes it on to the others of its node
as it comes. An all-reduce is both: a chunk whose sum is complete starts its second lap at once. So the link of a node carries
(M − 1)/M of the data a lap, which is the least possible for M nodes, however many ranks share the link, and all of them use it;
and inside a node what everyone gets is sent once where memory is shared. With nodes of one rank this is the ring of Patarasuk & Yuan
("Bandwidth optimal all-reduce algorithms", 2009), and on one node everyone sends to everyone.

The order of a sum follows from the owner of its block and from which ranks are a node: the node behind the owner's first, the
owner's last, and the same way within each, with its carrier last. 16-bit floats are added in rank order within a node, and so is
everything with `Routing.RANK_ORDER`. The sums of 16-bit floats that go on from there are not rounded: they are float32.

Nothing here waits before it takes a chunk, so nothing can lock up. What goes to this node and what goes to the next
one waits in a lane of its own: a slow link does not hold up the node, whose ranks have to feed theirs. What cannot go yet is
queued, at most the data of one lap. Blocks that are gathered are numbered N + b on the wire.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardnet.collectives.commons import Claim, Commons
from shardnet.collectives.lane import Lane, Outgoing
from shardnet.collectives.operation import Operation
from shardnet.collectives.parts import Part, count, piecewise
from shardnet.collectives.reduction import Array, Reduction, as_bytes, copy_bytes
from shardnet.collectives.route import Leg, Route, Routing
from shardnet.config import Limits
from shardnet.errors import ProtocolError, ShardnetError
from shardnet.wire import Buffer, Chunk, LoanRevoked

Bounds = list[tuple[int, int]]  # first element and the one after the last, by rank

# A gathered chunk is passed on to the next node as the bytes that came, which saves a checksum; but at most this many
# bytes of them are kept for that, the rest is read again from the output.
MAX_HELD_BYTES = 8 * 1024 * 1024
# While so many chunks wait for the next node, the neighbours get nothing more to add up: it could go no further either, and to
# copy it takes the processor from what keeps the link busy.
_AHEAD = 3
_BUSY_BYTES = 4 * 1024 * 1024  # are copied without a look at what else there is to do


@dataclass(slots=True)
class Hierarchical:
    """One lap or two, for one rank.

    `bounds` cuts the data into a block a rank, in elements. `source` is the whole input of a reduction. `output` is where the
    result goes: the whole data if `gather`, this rank's block else. It may be `source` itself. `shard` is this rank's block
    where a gather has yet to copy it into the output.

    With `commons` a gather goes into one buffer for all ranks of the node, if that can be had: see [Note: one buffer a node].
    Then `output` is replaced, and `claim` is what this rank has of it.
    """

    bounds: Bounds
    output: Array
    gather: bool
    reduction: Reduction | None = None
    source: Array | None = None
    shard: Array | None = None
    commons: Commons | None = None
    claim: Claim = field(default_factory=Claim)
    _rank: int = 0
    _size: int = 1
    _route: Route = field(init=False)
    _in_rank_order: bool = False  # sums
    _step: int = 1  # elements of a chunk
    _near: Lane = field(default_factory=Lane)  # to the other ranks of this node
    _far: Lane = field(default_factory=Lane)  # to the next node
    _filled: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, wire block) -> elements received
    _parts: dict[tuple[int, int], dict[int, Part]] = field(default_factory=dict)  # (block, first element) -> what came, by rank
    _held: int = 0
    _missing: int = 0  # elements still to be received
    _to_add: deque[tuple[int, Chunk]] = field(default_factory=deque)  # lent, by rank, and not read yet
    _to_copy: deque[tuple[int, Chunk]] = field(default_factory=deque)  # the same, of gathered blocks
    _changed: asyncio.Event = field(default_factory=asyncio.Event)  # something was lent, or nothing is missing

    async def run(self, op: Operation) -> None:
        """The algorithm of an operation."""
        if self.commons is None:
            await self._run(op)
            return
        try:
            await self._run(op)
        except BaseException:
            self.commons.fail(self.claim)
            raise
        self.commons.end(self.claim)

    async def _run(self, op: Operation) -> None:
        self._rank, self._size, self._route = op.group.rank, op.group.size, op.group.route
        self._in_rank_order = op.group.board.routing is Routing.RANK_ORDER
        if self.commons is not None:
            await self._claim_output(op, self.commons)
        self._step = self._chunk_elements(op.group.board.limits)
        self._plan()
        op.sink, op.takes_loans = self._on_chunk, True
        sources, targets = self._peers(op.group.peers)
        if self.commons is not None:
            for peer in sources:
                await self.commons.announce(op, peer, self.claim)
            await self._write_own()
            self._queue_own()
            for peer in targets:
                await self.commons.listen(op, peer)
            await self._work(op)
        elif self._lends_at_once(op):
            op.announce_with_loans(sources)
            self._queue_own()
            await self._work(op, targets)
        else:
            for peer in sources:
                await op.announce(peer)
            self._queue_own()
            for peer in targets:
                await op.cleared(peer)
            await self._work(op)
        await op.settle()

    def _lends_at_once(self, op: Operation) -> bool:
        """Whether all that this rank sends are loans, some to each peer: they need no room there, and so no announcement first."""
        return self._route.nodes == 1 and op.group.borrowers.issuperset(op.group.peers) and all(end > start for start, end in self.bounds)

    async def _claim_output(self, op: Operation, commons: Commons) -> None:
        """Set the output to what the node's keeper grants, or to memory of this rank's own if that is nothing."""
        length = self.bounds[-1][1]
        self.claim = await commons.claim(op, length * self.output.itemsize)
        dtype = self.output.dtype
        self.output = self.claim.shared.view(dtype) if self.claim.granted else np.empty(length, dtype)

    def _chunk_elements(self, limits: Limits) -> int:
        largest = max(self.output.itemsize, self._sum_itemsize)
        if self._route.nodes > 1:
            return limits.chunk_bytes // largest
        if not self.claim.granted:
            return limits.piece_bytes // largest
        return max(map(self._length, range(self._size)))  # nothing is moved: there is nothing to do meanwhile

    async def _write_own(self) -> None:
        """Put this rank's block into the common output, before anybody is told that it is there, or sent what is there."""
        assert self.shard is not None
        own, step = self._own_output(), max(1, _BUSY_BYTES // self.output.itemsize)
        for start in range(0, len(own), step):
            np.copyto(own[start : start + step], self.shard[start : start + step])
            await asyncio.sleep(0)
        self.shard = None

    # --- the plan

    @property
    def _sum_itemsize(self) -> int:
        """Of the sums that go from node to node."""
        return self.output.itemsize if self.reduction is None else self.reduction.sum_dtype.itemsize

    def _plan(self) -> None:
        """Count what will come and go."""
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

    def _queue_own(self) -> None:
        """What this rank begins with."""
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

    async def _work(self, op: Operation, unheard: Sequence[int] = ()) -> None:
        """Send and take everything; of the `unheard` no announcement was waited for."""
        try:
            async with asyncio.TaskGroup() as group:
                if unheard:
                    group.create_task(self._hear(op, unheard))
                for lane in (self._far, self._near):  # in this order: it may take far longer
                    if lane.unsent:
                        group.create_task(self._drain(op, lane))
                await self._take_lent()
        except ExceptionGroup as several:
            raise next((error for error in several.exceptions if isinstance(error, ShardnetError)), several.exceptions[0]) from None

    async def _hear(self, op: Operation, peers: Sequence[int]) -> None:
        for peer in peers:
            await op.cleared(peer)

    async def _drain(self, op: Operation, lane: Lane) -> None:
        while lane.unsent:
            item = await lane.take()
            lane.unsent -= len(item.data)
            self._near.wake()
            if item.frame is not None:
                self._held -= len(item.frame)
            if lane is self._near:  # the caller's own memory: it stays as it is
                if not self.claim.granted:
                    quick = await op.lend_all(item.peers, item.block, item.offset, as_bytes(item.data))
                else:
                    await op.place_all(item.peers, item.block, item.offset, item.data.nbytes)
                    quick = True
            else:
                await op.send_all(item.peers, item.block, item.offset, as_bytes(item.data), frame=item.frame)
                quick = False
            if item.copy_to is not None:
                copy_bytes(as_bytes(item.data), item.copy_to)
            elif quick:
                continue
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

    async def _take_lent(self) -> None:
        """Take what is lent, until nothing is missing: one chunk at a time, so that what others wait for goes out in between, and
        what is to be added first, for they wait for that."""
        while self._missing:
            if queue := self._to_add or self._to_copy:
                try:
                    self._take(*queue.popleft())
                except LoanRevoked:  # why, the lender says, by an abort or by its end
                    await asyncio.get_running_loop().create_future()
                await asyncio.sleep(0)
            else:
                self._changed.clear()
                await self._changed.wait()

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        if chunk.lent is None:
            self._take(source, chunk)
        elif not chunk.lent.returns and not self.claim.granted:
            raise ProtocolError(f"rank {source} says that its data is in place, but there is no memory that it could share with this rank")
        else:
            (self._to_add if chunk.block < self._size else self._to_copy).append((source, chunk))
            self._changed.set()

    def _take(self, source: int, chunk: Chunk) -> None:
        block = chunk.block % self._size
        place = self._place(source, chunk, block)
        self._filled[source, chunk.block] = place.stop
        self._missing -= place.stop - place.start
        if chunk.block < self._size:
            self._add(source, chunk, block, place)
        else:
            target = self.output[slice(*self.bounds[block])][place]
            if chunk.lent is None:
                copy_bytes(chunk.data, target)
            else:
                chunk.lent.read(0, target)
            if self._route.legs[block].carrier == self._rank:
                self._spread(block, place, target, chunk.frame)
        if not self._missing:
            self._changed.set()

    def _place(self, source: int, chunk: Chunk, block: int) -> slice:
        """Which elements of its block a chunk has. Raises ProtocolError if it is not the next one to come from there."""
        leg, itemsize = self._route.legs[block], self.output.itemsize
        carried = leg.carrier == self._rank
        if chunk.block < self._size:
            across = source == leg.before and self._route.nodes > 1 and leg.hops != 1
            itemsize = self._sum_itemsize if across else itemsize
            may_come = (across and chunk.lent is None) or source in self._route.neighbours
            welcome = self.source is not None and carried and may_come
        else:
            welcome = self.gather and chunk.block < 2 * self._size and block != self._rank
            welcome = welcome and source == (leg.before if carried else leg.carrier)
        filled = self._filled.get((source, chunk.block), 0)
        more, rest = divmod(chunk.size, itemsize)
        whole = more == min(self._step, self._length(block) - filled)
        if self._route.nodes > 1 and not whole:  # Limits are alike on all ranks; and each small piece would be kept by itself
            welcome = False
        if not welcome or rest or chunk.offset != filled * itemsize or filled + more > self._length(block):
            what = f"{chunk.size} bytes of block {chunk.block} at {chunk.offset}"
            raise ProtocolError(f"rank {source} sent {what}, expected offset {filled * itemsize}")
        return slice(filled, filled + more)

    def _add(self, source: int, chunk: Chunk, block: int, place: slice) -> None:
        """Keep what is to be added, or add all up if it is the last one. Data without a frame is lent for this call only."""
        assert self.source is not None
        assert self.reduction is not None
        leg, near = self._route.legs[block], source in self._route.neighbours
        parts = self._parts.setdefault((block, place.start), {})
        if chunk.lent is not None:
            parts[source] = chunk.lent
        else:
            came = self.reduction.view(chunk.data) if near else self.reduction.view_sum(chunk.data)
            parts[source] = np.copy(came) if chunk.frame is None and len(parts) + 1 < self._awaited(leg) else came
        if len(parts) < self._awaited(leg):
            return
        if len({count(part, self.source.itemsize) for part in parts.values()}) > 1:
            raise ProtocolError(f"rank {source} cut its part of block {block} in another way than the others: Limits differ")
        del self._parts[block, place.start]
        parts[self._rank] = self.source[slice(*self.bounds[block])][place]
        node = sorted(self._route.node) if self.reduction.widens or self._in_rank_order else self._route.node
        before = parts.get(leg.before) if leg.before not in node else None
        if leg.hops == 0:
            target = self._own_output()[place]
            for piece, arrays, sum_before in piecewise([parts[rank] for rank in node], before, target, self.source.dtype):
                self.reduction.reduce_in_turn(arrays, target[piece], before=sum_before)
            if self.gather:
                self._spread(block, place, target)
        else:
            total = np.empty(place.stop - place.start, self.reduction.sum_dtype)
            for piece, arrays, sum_before in piecewise([parts[rank] for rank in node], before, total, self.source.dtype):
                self.reduction.sum(arrays, out=total[piece], before=sum_before)
            self._far.first.append(Outgoing((leg.behind,), block, place.start * total.itemsize, total))
            self._far.wake()
