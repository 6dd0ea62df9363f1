"""Gathers and reductions, chunk by chunk, over nodes of one or more ranks: direct inside a node, a ring across nodes.

[Note: the hierarchy] To reduce, the ranks of each node give their parts of a block to the rank that carries it there (route.py),
which adds them up. The sums travel around the ring of nodes, from the node after the owner's to the owner's, and each node adds
its own sum. To gather, a block travels the same way from its owner, and each carrier passes it on to the others of its node
as it arrives. An all-reduce is both: a chunk whose sum is complete starts its second lap at once. So the link of a node carries
(M − 1)/M of the data per lap, which is the least possible for M nodes, however many ranks share the link, and all of them use it.
Inside a node, data for all ranks is sent once if they share memory. With nodes of one rank this is the ring of Patarasuk & Yuan
("Bandwidth optimal all-reduce algorithms", 2009), and on one node everyone sends to everyone.

The order of a sum follows from the owner of its block and from which ranks form each node: the node after the owner's comes first
and the owner's last, and within a node it is the same, with the carrier last. 16-bit floats are added in rank order within a node,
and with `Routing.RANK_ORDER` so is every dtype. A node passes its sums of 16-bit floats on unrounded, as float32.

No rank waits for anything before it takes a chunk, so there is no deadlock. Data for this node and data for the next node wait
in separate lanes: a slow link does not hold up the node, whose other ranks have to feed their own links. Data that cannot go yet
is queued, at most that of one lap. On the wire, gathered blocks are numbered N + b.

A link that waits for an announcement is idle. So up to `Limits.direct_bytes` per peer go to another node at once, and so does what is lent
inside the node. Only data beyond that, or data that takes room in a window, waits until its receiver has announced the collective.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np

from shardnet.collectives.commons import Claim, Commons
from shardnet.collectives.cut import Cut
from shardnet.collectives.lane import Lane, Outgoing
from shardnet.collectives.operation import Operation
from shardnet.collectives.parts import Part, count, piecewise
from shardnet.collectives.reduction import Array, Reduction, as_bytes, copy_bytes
from shardnet.collectives.route import Leg, Route, Routing
from shardnet.config import Limits
from shardnet.errors import ProtocolError, ShardnetError
from shardnet.wire import Buffer, Chunk, LoanRevoked

Bounds = list[tuple[int, int]]  # first element and the one after the last, by rank

# A gathered chunk is passed on to the next node as the bytes that came, which saves a checksum. At most this many
# bytes are kept for that; the rest is read again from the output.
MAX_HELD_BYTES = 8 * 1024 * 1024
# While this many chunks wait for the next node, the neighbours get nothing more to add up: their sums could go no further
# either, and copying takes processor time from the work that keeps the link busy.
_AHEAD = 3
_SHRINK = 8  # where chunks are passed on inside the node, the last ones of a block shrink to a size this many times smaller
_BUSY_BYTES = 4 * 1024 * 1024  # copied at once, before other tasks get their turn


@dataclass(slots=True)
class Hierarchical:
    """One or two laps around the ring of nodes, for one rank.

    `bounds` cuts the data into one block per rank, in elements. `source` is the whole input of a reduction. `output` is where the
    result goes: the whole data if `gather`, otherwise this rank's block. It may be `source` itself. `shard` is this rank's block
    if a gather has yet to copy it into the output. With `eager` the first data for another node does not wait for its announcement.

    With `commons` a gather goes into one buffer for all ranks of the node, if there is memory for it: see [Note: one buffer a node].
    Then `output` is replaced, and `claim` is this rank's share in that buffer.
    """

    bounds: Bounds
    output: Array
    gather: bool
    reduction: Reduction | None = None
    source: Array | None = None
    shard: Array | None = None
    eager: bool = True
    commons: Commons | None = None
    claim: Claim = field(default_factory=Claim)
    _rank: int = 0
    _size: int = 1
    _members: tuple[int, ...] = ()  # of the group, as global ranks
    _route: Route = field(init=False)
    _in_rank_order: bool = False  # whether sums are taken in rank order
    _cut: Cut = field(init=False)
    _eager_bytes: int = 0  # may go to each peer on another node before it has announced the collective
    _sent_eagerly: Counter[int] = field(default_factory=Counter)  # how many of them have gone, by peer
    _came: deque[tuple[int, Chunk]] = field(default_factory=deque)  # chunks that came before their place in the output was known
    _near: Lane = field(default_factory=Lane)  # to the other ranks of this node
    _far: Lane = field(default_factory=Lane)  # to the next node
    _filled: dict[tuple[int, int], int] = field(default_factory=dict)  # (rank, wire block) -> elements received
    _parts: dict[tuple[int, int], dict[int, Part]] = field(default_factory=dict)  # (block, first element) -> parts that came, by rank
    _held: int = 0
    _missing: int = 0  # elements still to be received
    _unread: Counter[int] = field(default_factory=Counter)  # elements by neighbour: still to come from it, or lent by it and not read yet
    _to_add: deque[tuple[int, Chunk]] = field(default_factory=deque)  # (lender, chunk) of what is lent and not read yet
    _to_copy: deque[tuple[int, Chunk]] = field(default_factory=deque)  # the same for gathered blocks
    _changed: asyncio.Event = field(default_factory=asyncio.Event)  # something was lent, or nothing is missing

    async def run(self, op: Operation) -> None:
        """The algorithm of an operation."""
        try:
            await self._run(op)
        except BaseException:
            if self.commons is not None:
                self.commons.fail(self.claim)
            raise
        else:
            if self.commons is not None:
                self.commons.end(self.claim)
        finally:
            # Their generators and callbacks refer to this object: in a cycle the caller's tensors would stay until Python's collector runs.
            self._near, self._far = Lane(), Lane()

    async def _run(self, op: Operation) -> None:
        self._rank, self._size, self._route, self._members = op.group.rank, op.group.size, op.group.route, op.group.members
        self._in_rank_order = op.group.board.routing is Routing.RANK_ORDER
        if self.commons is not None:
            op.sink, op.takes_loans = self._keep, True
            await self._claim_output(op, self.commons)
        limits = op.group.board.limits
        self._eager_bytes = limits.direct_bytes if self.eager else 0
        self._cut = self._cut_for(limits)
        self._plan()
        self._begin_to_take(op)
        peers = self._peers(op.group.peers)
        with_data = self._announced_with_data(op)
        op.announce_with_data(with_data)
        for peer in peers:
            if self.commons is not None:
                await self.commons.announce(op, peer, self.claim)
            elif peer not in with_data:
                await op.announce(peer)
        if self.commons is not None:
            await self._write_own()
        self._queue_own()
        await self._work(op, peers)
        await op.settle()

    def _keep(self, source: int, chunk: Chunk) -> None:
        """Keep a chunk that comes before its place in the output is known."""
        if chunk.frame is None and chunk.lent is None:
            chunk.data = bytes(chunk.data)  # lent for this call only
        self._came.append((source, chunk))

    def _begin_to_take(self, op: Operation) -> None:
        """Take the chunks that were kept, and those that come from now on."""
        op.sink, op.takes_loans = self._on_chunk, True
        while self._came:
            self._on_chunk(*self._came.popleft())

    def _announced_with_data(self, op: Operation) -> tuple[int, ...]:
        """Peers that get data at once in any case, so that the announcement goes with it."""
        if self.commons is not None or any(end == start for start, end in self.bounds):
            return ()
        near = self._route.neighbours if op.group.borrowers.issuperset(self._route.neighbours) else ()
        first = self._cut.size(0, self._length(self._rank)) * self.output.itemsize
        if self.source is None and self._route.nodes > 1 and first <= self._eager_bytes:
            return (*near, self._route.legs[self._rank].behind)
        return near

    async def _claim_output(self, op: Operation, commons: Commons) -> None:
        """Set the output to the memory that the node's keeper grants, or to memory of this rank's own if the keeper grants none."""
        length = self.bounds[-1][1]
        self.claim = await commons.claim(op, length * self.output.itemsize)
        dtype = self.output.dtype
        self.output = self.claim.shared.view(dtype) if self.claim.granted else np.empty(length, dtype)

    def _cut_for(self, limits: Limits) -> Cut:
        largest = max(self.output.itemsize, self._sum_itemsize)
        step = limits.chunk_bytes // largest
        if self._route.nodes > 1:
            first = min(step, self._eager_bytes // largest) or step
            return Cut(step, first, max(1, step // _SHRINK) if self._route.is_hierarchical else step)
        if self.claim.granted:  # nothing is moved, so there is nothing to overlap
            return Cut.whole(max(map(self._length, range(self._size))))
        return Cut.whole(limits.piece_bytes // largest)

    async def _write_own(self) -> None:
        """Put this rank's block into the common output, before any peer is told that it is there or gets data from there."""
        assert self.shard is not None
        own, step = self._own_output(), max(1, _BUSY_BYTES // self.output.itemsize)
        for start in range(0, len(own), step):
            np.copyto(own[start : start + step], self.shard[start : start + step])
            await asyncio.sleep(0)
        self.shard = None

    # --- the plan

    @property
    def _sum_itemsize(self) -> int:
        """The item size of the sums that go from node to node."""
        return self.output.itemsize if self.reduction is None else self.reduction.sum_dtype.itemsize

    def _plan(self) -> None:
        """Count the elements that will come and go."""
        for block, leg in enumerate(self._route.legs):
            length = self._length(block)
            carried = leg.carrier == self._rank
            if self.source is not None:
                self._missing += length * (len(self._route.neighbours) + self._comes_across(leg)) * carried
                self._unread.update(dict.fromkeys(self._route.neighbours, length * carried))
                self._near.unsent += length * (not carried)
                self._far.unsent += length * (carried and leg.hops > 0)
            if self.gather:
                self._missing += length * (block != self._rank)
                self._unread[leg.carrier] += length * (not carried)
                self._near.unsent += length * (carried and bool(self._route.neighbours))
                self._far.unsent += length * (carried and leg.hops < self._route.nodes - 1)

    def _queue_own(self) -> None:
        """Queue the data that this rank has at the beginning."""
        if self.source is not None:
            self._far.at_first = self._sums_of_one()
            self._near.at_last = self._contributions()
            self._near.may_run_ahead = lambda: self._far.queued < _AHEAD
        elif self.gather:
            own = self._own_output() if self.shard is None else self.shard
            for chunk in self._cut.slices(len(own)):
                self._spread(self._rank, chunk, own[chunk])

    def _comes_across(self, leg: Leg) -> bool:
        """Whether the node before sends a sum of this block, which this rank carries, for this node to add to."""
        return self._route.nodes > 1 and leg.hops != 1

    def _sums_of_one(self) -> Iterator[Outgoing]:
        """The first sums of a node of one rank: its sum is its own part, which is widened only when it is sent."""
        assert self.source is not None
        assert self.reduction is not None
        for block, leg in enumerate(self._route.legs):
            if leg.carrier == self._rank and not self._route.neighbours and not self._comes_across(leg):
                own = self.source[slice(*self.bounds[block])]
                for chunk in self._cut.slices(len(own)):
                    yield Outgoing((leg.behind,), block, chunk.start * self._sum_itemsize, self.reduction.widen(own[chunk]))

    def _contributions(self) -> Iterator[Outgoing]:
        """The parts that the neighbours add up: the first chunk of every block, then the second ones, so that all can begin at once.
        Of these, blocks with the longest way to go come first."""
        assert self.source is not None
        others = [(leg, block) for block, leg in enumerate(self._route.legs) if leg.carrier != self._rank]
        turn = {peer: index for index, peer in enumerate(self._route.neighbours)}
        others.sort(key=lambda entry: ((entry[0].hops - 1) % self._route.nodes, turn[entry[0].carrier], entry[1]))
        for places in zip_longest(*(self._cut.slices(self._length(block)) for _, block in others)):
            for (leg, block), place in zip(others, places, strict=True):
                if place is not None:
                    part = self.source[slice(*self.bounds[block])][place]
                    yield Outgoing((leg.carrier,), block, place.start * part.itemsize, part)

    def _length(self, block: int) -> int:
        start, end = self.bounds[block]
        return end - start

    def _own_output(self) -> Array:
        """This rank's block of the output; without a gather that is the whole output."""
        return self.output[slice(*self.bounds[self._rank])] if self.gather else self.output

    def _peers(self, everyone: list[int]) -> list[int]:
        """The peers to which this rank announces the collective and whose announcements it waits for: those that send to it, and those to
        which it sends.

        If no block is empty, a rank that has received all its data knows that all ranks have entered, as [Note: no rank ends before
        all have entered] demands. If a block is empty (in a broadcast all but one are), a rank would not know that: then everyone
        announces to everyone.
        """
        if not all(end > start for start, end in self.bounds):
            return everyone
        near = set(self._route.neighbours)
        for leg in self._route.legs:
            if leg.carrier == self._rank and self._route.nodes > 1:
                if (self.source is not None and leg.hops != 1) or (self.gather and leg.hops != 0):
                    near.add(leg.before)
                if (self.source is not None and leg.hops != 0) or (self.gather and leg.hops != self._route.nodes - 1):
                    near.add(leg.behind)
        return [peer for peer in everyone if peer in near]

    # --- sending

    async def _work(self, op: Operation, peers: list[int]) -> None:
        """Send and take everything, and wait for the announcements of all peers."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._hear(op, peers))
                for lane, drain in ((self._far, self._drain_far), (self._near, self._drain_near)):  # in this order: it may take far longer
                    if lane.unsent:
                        group.create_task(drain(op))
                await self._take_lent(op)
        except ExceptionGroup as several:
            raise next((error for error in several.exceptions if isinstance(error, ShardnetError)), several.exceptions[0]) from None

    async def _hear(self, op: Operation, peers: list[int]) -> None:
        for peer in peers:
            if self.commons is not None:
                await self.commons.listen(op, peer)
            else:
                await op.cleared(peer)

    async def _drain_far(self, op: Operation) -> None:
        while self._far.unsent:
            item = await self._take_from(self._far)
            if item.frame is not None:
                self._held -= len(item.frame)
            for peer in item.peers:
                self._sent_eagerly[peer] += item.data.nbytes
                if self._sent_eagerly[peer] > self._eager_bytes:
                    await op.announced(peer)
            await op.send_all(item.peers, item.block, item.offset, as_bytes(item.data), frame=item.frame)
            self._copy_sent(item)
            await asyncio.sleep(0)  # a send may end without waiting; what arrives in the meantime must get its turn to be added

    async def _drain_near(self, op: Operation) -> None:
        """Send to this node. The data is in the caller's own memory, which does not change meanwhile."""
        if not self.claim.granted and not op.group.borrowers.issuperset(self._route.neighbours):
            for peer in self._route.neighbours:  # some data takes room in a window
                await op.announced(peer)
        while self._near.unsent:
            item = await self._take_from(self._near)
            if self.claim.granted:
                await op.place_all(item.peers, item.block, item.offset, item.data.nbytes)
                quick = True
            else:
                quick = await op.lend_all(item.peers, item.block, item.offset, as_bytes(item.data))
            self._copy_sent(item)
            if not quick or item.copy_to is not None:
                await asyncio.sleep(0)

    async def _take_from(self, lane: Lane) -> Outgoing:
        item = await lane.take()
        lane.unsent -= len(item.data)
        self._near.wake()
        return item

    def _copy_sent(self, item: Outgoing) -> None:
        if item.copy_to is not None:
            copy_bytes(as_bytes(item.data), item.copy_to)

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

    async def _take_lent(self, op: Operation) -> None:
        """Take lent chunks until nothing is missing: one at a time, so that data for other ranks goes out in between, and chunks to be
        added before those to be copied, because other ranks wait for the sums."""
        while self._missing:
            if queue := self._to_add or self._to_copy:
                source, chunk = queue.popleft()
                try:
                    self._take(source, chunk)
                except LoanRevoked:  # the lender tells why, by an abort or by its end, which cancels this wait
                    await asyncio.get_running_loop().create_future()
                for peer in self._route.neighbours:
                    if not self._unread[peer]:
                        await op.return_loan(peer)
                await asyncio.sleep(0)
            else:
                self._changed.clear()
                await self._changed.wait()

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        if chunk.lent is None:
            self._take(source, chunk)
        elif not chunk.lent.returns and not self.claim.granted:
            raise ProtocolError(f"rank {self._members[source]} says that its data is in shared memory, but shares no memory with this rank")
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
            self._unread[source] -= len(target)
            if chunk.lent is None:
                copy_bytes(chunk.data, target)
            else:
                chunk.lent.read(0, target)
            if self._route.legs[block].carrier == self._rank:
                self._spread(block, place, target, chunk.frame)
        if not self._missing:
            self._changed.set()

    def _place(self, source: int, chunk: Chunk, block: int) -> slice:
        """Which elements of its block a chunk holds. Raises ProtocolError if it is not the next chunk due from that rank."""
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
        whole = more == self._cut.size(filled, self._length(block))
        if self._route.nodes > 1 and not whole:  # all ranks have the same Limits; and each small piece would be kept by itself
            welcome = False
        if not welcome or rest or chunk.offset != filled * itemsize or filled + more > self._length(block):
            what = f"{chunk.size} bytes of block {chunk.block} at offset {chunk.offset}"
            raise ProtocolError(f"rank {self._members[source]} sent {what}, which were not due; expected offset {filled * itemsize}")
        return slice(filled, filled + more)

    def _add(self, source: int, chunk: Chunk, block: int, place: slice) -> None:
        """Keep a part to be added, or add all parts up if it is the last one. Data without a frame is valid during this call only."""
        assert self.reduction is not None
        leg, near = self._route.legs[block], source in self._route.neighbours
        parts = self._parts.setdefault((block, place.start), {})
        came = self.reduction.view(chunk.data) if near else self.reduction.view_sum(chunk.data)
        parts[source] = came if chunk.lent is None else chunk.lent
        if any(count(part, self.output.itemsize) != place.stop - place.start for part in parts.values()):
            raise ProtocolError(
                f"rank {self._members[source]} sent its part of block {block} in chunks of another size than the others; "
                "give all ranks the same Limits"
            )
        node_is_there = self._rank in parts or parts.keys() >= set(self._route.neighbours)
        if not node_is_there or (self._comes_across(leg) and leg.before not in parts):
            if chunk.lent is None and chunk.frame is None:
                parts[source] = came.copy()
            if node_is_there and leg.hops == 0 and not self.reduction.widens:
                self._sum_ahead(parts, block, place)
            return
        del self._parts[block, place.start]
        before = parts.pop(leg.before) if self._comes_across(leg) else None
        if leg.hops == 0:
            target = self._own_output()[place]
            for piece, arrays, sum_before in self._piecewise(parts, block, place, before, target):
                self.reduction.reduce_in_turn(arrays, target[piece], before=sum_before)
            if self.gather:
                self._spread(block, place, target)
        else:
            total = np.empty(place.stop - place.start, self.reduction.sum_dtype)
            for piece, arrays, sum_before in self._piecewise(parts, block, place, before, total):
                self.reduction.sum(arrays, out=total[piece], before=sum_before)
            self._far.first.append(Outgoing((leg.behind,), block, place.start * total.itemsize, total))
            self._far.wake()

    def _sum_ahead(self, parts: dict[int, Part], block: int, place: slice) -> None:
        """Put this node's sum where the result will be, while the other nodes' sum has yet to come over the link: then less is left to do
        once that is here, and the neighbours get their loans back."""
        assert self.reduction is not None
        target = self._own_output()[place]
        for piece, arrays, _ in self._piecewise(parts, block, place, None, target):
            self.reduction.sum(arrays, out=target[piece])
        parts.clear()
        parts[self._rank] = target

    def _piecewise(
        self, parts: dict[int, Part], block: int, place: slice, before: Part | None, out: Array
    ) -> Iterator[tuple[slice, Iterator[Array], Array | None]]:
        """`piecewise` of this node's parts, this rank's own among them, in the order of the sum; or of their sum, if that is in place."""
        assert self.source is not None
        if self._rank in parts:
            node = [self._rank]
        else:
            parts[self._rank] = self.source[slice(*self.bounds[block])][place]
            node = sorted(self._route.node) if self._in_rank_order or (self.reduction and self.reduction.widens) else list(self._route.node)
        yield from piecewise([parts[rank] for rank in node], before, out, self.source.dtype)
        for rank in node:
            self._unread[rank] -= place.stop - place.start
