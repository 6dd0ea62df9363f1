"""An all-reduce in two direct steps: each block's contributions go to its owner, then the owner's sum goes to everyone.

It sends as many bytes and messages as a ring, but in 2 steps instead of 2(N − 1): for data that is too large to send
whole to everyone, and too small for a ring to pipeline. With one message per block no send has to wait: a contribution
is sent eagerly, and a rank that sends a sum knows by then that every rank has entered.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.operation import Operation
from shardnet.collectives.reduction import Array, Reduction, as_bytes
from shardnet.errors import ProtocolError
from shardnet.wire import Buffer, Chunk


@dataclass(slots=True)
class TwoShot:
    """Both steps for one rank. `bounds` cuts `source` into one block per rank, in elements; `output` may be `source` itself."""

    bounds: Bounds
    source: Array
    output: Array
    reduction: Reduction
    _rank: int = 0
    _members: tuple[int, ...] = ()  # of the group, as global ranks
    _contributions: dict[int, Buffer] = field(default_factory=dict)  # by rank, to this rank's block
    _sums: set[int] = field(default_factory=set)  # ranks whose block is complete in `output`
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, op: Operation) -> None:
        """The algorithm of an all-reduce operation."""
        self._rank, self._members, peers = op.group.rank, op.group.members, op.group.peers
        op.sink = self._on_chunk
        for peer in peers:
            await op.send(peer, peer, data=as_bytes(self._block(self.source, peer)), announcement=op.announcement())
        for peer in peers:
            await op.cleared(peer)
        mine = self._block(self.output, self._rank)
        if mine.size:
            await self._until(lambda: len(self._contributions) == len(peers))
            own = self._block(self.source, self._rank)
            parts = [own if rank == self._rank else self._contribution(rank) for rank in range(op.group.size)]
            self.reduction.reduce(parts, mine)
            for peer in peers:
                await op.send(peer, op.group.size + self._rank, data=as_bytes(mine))
        expected = {peer for peer in peers if self._block(self.output, peer).size}
        await self._until(lambda: self._sums == expected)

    def _block(self, whole: Array, rank: int) -> Array:
        return whole[slice(*self.bounds[rank])]

    def _contribution(self, rank: int) -> Array:
        return self.reduction.view(self._contributions[rank])

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        summed = chunk.block == len(self.bounds) + source
        target = self._block(self.output, source if summed else self._rank)
        sent = f"rank {self._members[source]} sent {len(chunk.data)} bytes of block {chunk.block} at offset {chunk.offset}"
        if not (summed or chunk.block == self._rank) or chunk.offset or len(chunk.data) != target.nbytes:
            raise ProtocolError(f"{sent}, expected {target.nbytes} bytes of block {self._rank} or of its own sum, at offset 0")
        if source in (self._sums if summed else self._contributions):
            raise ProtocolError(f"{sent}, which it had already sent")
        if summed:
            as_bytes(target)[:] = chunk.data
            self._sums.add(source)
        else:  # without a frame it is the sender's own buffer, lent for this call
            self._contributions[source] = chunk.data if chunk.frame is not None else bytes(chunk.data)
        self._changed.set()
