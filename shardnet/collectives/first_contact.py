"""`FirstContact`: which ranks of a group have made it.

[Note: first contact] Each rank makes a sub-group at its own time, and until then has nowhere to put what is sent to it there. So each rank
tells the others when it has made one, and waits in its first collectives until it has heard the same from all of them. What a rank has to
keep for groups that it has yet to make is therefore small, even for tens of thousands of groups and however much is done in them afterwards
(early.py). The world needs no such message, because it is made with the mesh, nor do channels, which carry nothing that was not asked for
(turns.py).
"""

import asyncio
import time
from typing import TYPE_CHECKING

from shardnet.collectives.operation import Operation
from shardnet.flight import State
from shardnet.pb.mesh_pb2 import Control, GroupMade

if TYPE_CHECKING:
    from shardnet.collectives.group import Group


class FirstContact:
    """One group's; lives as long as it. Runs on the loop thread."""

    def __init__(self, group: "Group", *, needed: bool) -> None:
        self._group = group
        self.missing = set(group.peers) if needed else set[int]()  # the ranks of the group that have not said that they have made it
        self._last = group.rank  # the last rank that has said it
        self._over = asyncio.Event()

    @property
    def is_over(self) -> bool:
        """Whether all ranks have made the group. Any thread."""
        return not self.missing

    def greet(self) -> None:
        """Tell the other ranks that this one has made the group, unless they know."""
        for peer in self.missing:
            self._group.tell(peer, 0, Control(group_made=GroupMade()))

    def hear(self, peer: int) -> None:
        """Handle a peer's word that it has made the group."""
        if peer not in self.missing:
            self._group.telemetry.count_stale()
            return
        self.missing.discard(peer)
        if self.is_over:
            self._last = peer
            self._over.set()
            self._group.rounds.meet()

    async def wait(self, operation: Operation) -> None:
        """Wait until all ranks have made the group, before the operation begins."""
        operation.flight.state, start = State.WAITING, time.perf_counter_ns()
        await self._over.wait()
        operation.flight.state = State.BEGUN
        operation.waited(self._last, start)
