"""Direct exchange: every rank sends each peer that peer's data, in one step.

Used where latency rules (small collectives), where each pair's bytes differ (all_to_all, send and receive), and for
sums of 16-bit floats, whose contributions must be widened before they are added (reduction.py). For an all-gather or
reduce-scatter it moves the same number of bytes as a ring.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from shardnet.collectives.operation import Operation
from shardnet.collectives.reduction import Array, as_bytes, copy_bytes
from shardnet.collectives.turns import Turns
from shardnet.errors import ProtocolError, ShardnetError
from shardnet.pb.mesh_pb2 import Announcement
from shardnet.wire import Buffer, Chunk

# (operation, sender, receiver, bytes sent, bytes expected) -> the error of two ranks that disagree on the size
Disagreement = Callable[[Operation, int, int, int, int], ShardnetError]


@dataclass(slots=True)
class Exchange:
    """What one rank sends to and receives from each peer; ranks are the group's.

    `sends` maps each peer to an array, `receives` maps each peer to an array of the size that it will send. Every array
    is complete when the exchange is done. With `eager` no data waits for the peers' announcements. That is for exchanges
    in which each rank waits for all others and that fit into one chunk.
    """

    sends: dict[int, Array]
    receives: dict[int, Array]
    peers: list[int]  # all peers to announce to, and whose announcements to wait for
    eager: bool = False
    disagree: Disagreement | None = None  # if the signature does not settle the sizes; never with `eager`
    turns: Turns | None = None  # on a channel
    _filled: dict[int, int] = field(default_factory=dict)
    _missing: int = 0
    _members: tuple[int, ...] = ()  # of the group, as global ranks
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, op: Operation) -> None:
        """The algorithm of an exchange operation."""
        self._missing = sum(array.nbytes for array in self.receives.values())
        if not self._missing:
            self._arrived.set()
        self._members = op.group.members
        op.sink = self._on_chunk
        if self.turns is None:
            await self._agree(op)
        else:
            (peer,) = self.peers
            async with self.turns.turn(op, peer):
                await self._agree(op)
        if not self.eager:
            await self._send_all(op)
        await self._arrived.wait()

    async def _agree(self, op: Operation) -> None:
        for peer in self.peers:
            await self._open(op, peer)
        for peer in self.peers:
            self._check_sizes(op, peer, await op.cleared(peer))

    async def _open(self, op: Operation, peer: int) -> None:
        sends = self.sends[peer].nbytes if peer in self.sends else 0
        expects = self.receives[peer].nbytes if peer in self.receives else 0
        data: Buffer = as_bytes(self.sends[peer]) if self.eager and sends else b""
        await op.send(peer, data=data, announcement=op.announcement(sends=sends, expects=expects))

    def _check_sizes(self, op: Operation, peer: int, theirs: Announcement) -> None:
        if self.disagree is None:
            return
        expected = self.receives[peer].nbytes if peer in self.receives else 0
        if theirs.send_bytes != expected:
            raise self.disagree(op, peer, op.group.rank, theirs.send_bytes, expected)
        sent = self.sends[peer].nbytes if peer in self.sends else 0
        if theirs.expect_bytes != sent:
            raise self.disagree(op, op.group.rank, peer, sent, theirs.expect_bytes)

    async def _send_all(self, op: Operation) -> None:
        """Send to all peers concurrently, so that a slow one does not hold up the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for peer, array in self.sends.items():
                    group.create_task(self._send(op, peer, as_bytes(array)))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # each is the loss of a peer, and the first is the cause

    async def _send(self, op: Operation, peer: int, data: memoryview) -> None:
        size = op.group.board.limits.chunk_bytes
        for offset in range(0, len(data), size):
            await op.send(peer, offset=offset, data=data[offset : offset + size])

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        target = self.receives.get(source)
        filled = self._filled.get(source, 0)
        if target is None or chunk.offset != filled or filled + len(chunk.data) > target.nbytes:
            raise ProtocolError(
                f"rank {self._members[source]} sent {len(chunk.data)} bytes at offset {chunk.offset}, which were not due; "
                f"expected offset {filled}"
            )
        copy_bytes(chunk.data, target.view(np.uint8)[filled : filled + len(chunk.data)])
        self._filled[source] = filled + len(chunk.data)
        self._missing -= len(chunk.data)
        if not self._missing:
            self._arrived.set()
