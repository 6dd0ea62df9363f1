"""A mesh inside one process: ranks hand each other chunks on the shared loop thread."""

import asyncio
from typing import Self

from shardnet.errors import PeerLost
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.transport.base import Mesh, Receiver
from shardnet.wire import Chunk


class MemoryMesh(Mesh):
    """One rank's end of an in-process mesh; `connect` makes it."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, epoch=1)
        self._ends: list[MemoryMesh] = []
        self._receiver: Receiver | None = None
        self._open = True

    @classmethod
    def connect(cls, world_size: int) -> list[Self]:
        """The ends of a new mesh, by rank."""
        ends = [cls(rank, world_size) for rank in range(world_size)]
        for end in ends:
            end._ends = list[MemoryMesh](ends)
        return ends

    async def start(self, receiver: Receiver) -> None:
        self.attach(receiver)

    def attach(self, receiver: Receiver) -> None:
        """Start without a coroutine: there is nothing to wait for."""
        self._receiver = receiver

    async def send(self, peer: int, chunk: Chunk) -> None:
        # Yield first: without it two ranks that answer each other would recurse, and a large collective would
        # keep every other task off the loop.
        await asyncio.sleep(0)
        end = self._ends[peer]
        if not self._open or not end._open or end._receiver is None:
            raise PeerLost(f"rank {peer} (in this process) has closed", peer)
        end._receiver.on_chunk(self.rank, chunk)

    def address(self, rank: int) -> str:
        return f"memory:{rank}"

    async def aclose(self) -> None:
        if not self._open or self._receiver is None:
            return
        goodbye = Chunk(self.epoch, 0, 0, control=mesh_pb2.Control(goodbye=self._receiver.goodbye()))
        for peer in self.peers:
            end = self._ends[peer]
            if end._open and end._receiver is not None:
                end._receiver.on_chunk(self.rank, goodbye)
        self._open = False

    def abort(self, why: str = "") -> None:
        LoopThread.shared().call(self._abort, why)

    def _abort(self, why: str) -> None:
        if not self._open:
            return
        self._open = False
        for peer in self.peers:
            receiver = self._ends[peer]._receiver
            if self._ends[peer]._open and receiver is not None:
                receiver.on_lost(self.rank, why or "it aborted", told=bool(why))
