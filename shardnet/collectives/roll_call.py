"""`RollCall`: asks the ranks of a group how far they are, when a collective takes too long."""

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardnet.pb.mesh_pb2 import Control, Probe, ProbeReply
from shardnet.waiting import Absent
from shardnet.wire import Chunk

if TYPE_CHECKING:
    from shardnet.collectives.group import Group

WAIT_S = 0.4  # a hang must not outlive its timeout by more than 0.5 s
BUSY_BYTES = 4 * 1024  # if more moves in WAIT_S, data moves: pings are far fewer bytes, and a busy link of 1 Mbit/s moves ten times as many


@dataclass(frozen=True, slots=True)
class Attendance:
    """What the ranks of a group have answered."""

    absent: tuple[Absent, ...]  # ranks that have not entered the collective, or did not answer
    busy: tuple[Absent, ...]  # ranks that could not answer: their answer queues behind data, which moves
    entered_below: int  # all have entered the collectives with lower numbers


class RollCall:
    """One group's; lives as long as it. Runs on the loop thread."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._count = 0
        self._moved: tuple[int, dict[int, int]] = -1, {}  # of the last roll call: its collective, and the bytes moved by then, by peer
        self._open: dict[int, tuple[dict[int, ProbeReply], set[int], asyncio.Event]] = {}  # by number; the set holds peers yet to answer

    async def hold(self, sequence: int) -> Attendance:
        """Ask every other member whether it has entered a collective. Takes at most WAIT_S.

        A rank that does not even answer pings is not asked, as it would seem to be alive (tests/training/test_connect.py, frozen).
        """
        self._count += 1
        number, group = self._count, self._group
        replies: dict[int, ProbeReply] = {}
        asked = {peer: self._moved_bytes(peer) for peer in group.peers if not self._is_silent(peer)}
        if self._moved[0] == sequence:
            asked |= {peer: moved for peer, moved in self._moved[1].items() if peer in asked}  # a link may have stood still just now
        self._open[number] = replies, _, complete = replies, set(asked), asyncio.Event()
        try:
            for peer in asked:
                group.board.post(group.members[peer], Chunk(group.epoch, group.id, sequence, control=Control(probe=Probe(id=number))))
            if asked:
                async with asyncio.timeout(WAIT_S):
                    await complete.wait()
        except TimeoutError:
            pass
        finally:
            del self._open[number]
        self._moved = sequence, {peer: self._moved_bytes(peer) for peer in group.peers}
        absent, busy = list[Absent](), list[Absent]()
        for peer in sorted(group.peers):
            reply = replies.get(peer)
            if reply is None and peer in asked and self._moved[1][peer] - asked[peer] >= BUSY_BYTES:
                busy.append(self._absent(peer, None))
            elif reply is None or not reply.entered:
                absent.append(self._absent(peer, reply))
        positions = [replies[peer].next_sequence if peer in replies else 0 for peer in group.peers]
        return Attendance(tuple(absent), tuple(busy), max(min(positions, default=0), 0 if absent or busy else sequence + 1))

    def _moved_bytes(self, peer: int) -> int:
        return self._group.board.mesh.moved_bytes(self._group.members[peer])

    def _is_silent(self, peer: int) -> bool:
        return self._group.board.mesh.is_silent(self._group.members[peer])

    def _absent(self, peer: int, reply: ProbeReply | None) -> Absent:
        rank = self._group.members[peer]
        address = self._group.board.mesh.address(rank)
        return Absent(rank, address) if reply is None else Absent(rank, address, reply.next_sequence, reply.last_signature, reply.waits_in)

    def hear(self, source: int, reply: ProbeReply) -> None:
        """Take a rank's answer, which may come too late."""
        if (waiting := self._open.get(reply.id)) is not None:
            replies, awaited, complete = waiting
            replies[source] = reply
            awaited.discard(source)
            if not awaited:
                complete.set()
