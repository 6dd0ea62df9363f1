"""`Commons`: memory that ranks of one node have in common, so that what all of them gather is there once.

[Note: one buffer a node] A collective whose result is the same on all ranks of a node is written into one piece of memory, a
slot, by all of them: each its own block, and each carrier those that come from other nodes. Nobody copies what another one
has written; where a chunk would have gone, it is told that it is in its place.

One rank, the keeper, says which slot: with its announcement or letter, for which the others wait before they write.
A slot is granted again only when every rank of the node has released it. So a rank that runs ahead cannot
overwrite what another one still reads: the keeper makes another slot, and later drops what is more than was ever in use at once, or what
it has released for good.
Ranks tell the keeper what they have released with their announcements and letters, which costs no message, and again until it has granted
that slot anew, or dropped it: a collective that ends well here need not have ended well there. Every grant has a serial number, so what is
said twice or late does no harm. Where the keeper's side of a collective fails, it never grants that slot again, for it cannot know who
has it.

Each rank computes with a private mapping of a slot: what it writes there, only it sees, and only until it releases it.
"""

import asyncio
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.base import Mesh
from shardnet.transport.shared_memory import Segment, Stranger
from shardnet.wire import LoanRevoked

if TYPE_CHECKING:
    from shardnet.collectives.operation import Operation

log = logging.getLogger(__name__)
Release = Callable[[bool], object]

_MOST_UNUSED = 2  # times its own size, a result may be given memory of


@dataclass(slots=True, eq=False)
class _Slot:
    id: int
    size: int  # bytes
    segment: Segment
    serial: int = 0  # of its last grant
    holders: set[int] = field(default_factory=set)  # ranks that may still read or write it; known to the keeper
    unwanted: bool = False  # whom it was granted to last has no more use for so much memory; known to the keeper


@dataclass(slots=True, eq=False)
class Claim:
    """One rank's share in one grant, or in none; lives as long as its collective."""

    size: int = 0  # bytes of the result, which are the slot's first ones
    slot: _Slot | None = None
    serial: int = 0
    told: list[int] = field(default_factory=list)  # about other slots: the keeper which are dropped, the others what they have released
    unwanted: bool = False  # released for good

    @property
    def granted(self) -> bool:
        return self.slot is not None

    @property
    def shared(self) -> np.ndarray:
        """The result's bytes, for all ranks of the node to write."""
        assert self.slot is not None
        return self.slot.segment.shared[: self.size]


class Commons:
    """One rank's side of it, for all groups that have the same ranks on this node; lives as long as the mesh. Ranks are global.

    Safe to use from any thread, but for what waits for announcements, which runs on the loop thread. See [Note: one buffer a node].
    """

    def __init__(self, mesh: Mesh, node: frozenset[int], where: Callable[[], str]) -> None:
        """`where` begins what is logged."""
        self._mesh = mesh
        self._where = where
        self._node = node
        self.keeper = min(node)
        self._freed: deque[Claim] = deque()  # that this rank needs no more: from any thread, even in the middle of anything
        self._lock = threading.Lock()  # over what follows
        self._slots: dict[int, _Slot] = {}  # by id, oldest first
        self._next_id = 0
        self._serial = 0
        self._peak_bytes = 0  # the most that was granted at once
        self._peak_count = 0  # in how many slots
        self._has_complained = False
        self._dropped: list[int] = []  # ids of slots that the others may not know to be gone
        self._released: dict[int, int] = {}  # by slot, the serial of its last grant, which the keeper may not know to be released

    @property
    def keeps(self) -> bool:
        """Whether this rank is the keeper."""
        return self.keeper == self._mesh.rank

    # --- a collective, by letters

    def begin(self, size: int) -> Claim:
        """What this rank has to say in a collective whose result has so many bytes; on the keeper with a slot for it, if one can be had."""
        with self._lock:
            while self._freed:
                self._release(self._freed.popleft())
            return self._grant(size) if self.keeps else Claim(size, told=list(self._released.values()))

    def note(self, claim: Claim) -> mesh_pb2.Announcement:
        """That, in words: to the node the keeper's grant, to the keeper what is released."""
        if not self.keeps:
            return mesh_pb2.Announcement(released=claim.told)
        if claim.slot is None:
            return mesh_pb2.Announcement()
        segment = claim.slot.segment
        place = {"id": claim.slot.id, "size": claim.slot.size, "descriptor": max(segment.descriptor, 0), "inode": segment.inode}
        return mesh_pb2.Announcement(grant=mesh_pb2.Grant(serial=claim.serial, dropped=claim.told, **place))

    def take(self, claim: Claim, announcement: mesh_pb2.Announcement) -> None:
        """What the keeper has said: the slot, if it grants one.

        Raises LoanRevoked if the keeper is gone, which its stream is about to show, and OSError or ValueError if the slot cannot be mapped.
        """
        if not announcement.HasField("grant"):
            return
        grant = announcement.grant
        if grant.size < claim.size:
            raise ValueError(f"{grant.size} bytes are no room for {claim.size}")
        with self._lock:
            for each in grant.dropped:
                self._drop(each)
            if grant.id not in self._slots:
                self._slots[grant.id] = _Slot(grant.id, grant.size, self._open(grant))
            self._released.pop(grant.id, None)
            claim.slot, claim.serial = self._slots[grant.id], grant.serial

    def hear(self, rank: int, announcement: mesh_pb2.Announcement) -> None:
        """What another rank of the node has said to the keeper."""
        with self._lock:
            self._on_released(rank, set(announcement.released))

    def end(self, claim: Claim) -> None:
        """The collective has ended well, so everybody has mapped the slot, and heard which ones are dropped."""
        with self._lock:
            if claim.slot is not None:
                claim.slot.segment.close()
            self._dropped = [each for each in self._dropped if each not in claim.told]

    def fail(self, claim: Claim) -> None:
        """The collective has failed."""
        with self._lock:
            if claim.slot is not None and self.keeps:
                self._retire(claim.slot)
            else:
                self._release(claim)

    # --- the same, by announcements

    async def claim(self, op: "Operation", size: int) -> Claim:
        """`begin`, and on all others than the keeper `take` what it announces.

        Raises ProtocolError if a slot was granted and cannot be mapped.
        """
        claim = self.begin(size)
        if not self.keeps:
            announcement = await op.cleared(op.group.members.index(self.keeper))
            try:
                self.take(claim, announcement)
            except LoanRevoked:
                await asyncio.get_running_loop().create_future()
            except (OSError, ValueError) as error:
                raise self.unusable(op.group.board.where(), op.name, error) from error
        return claim

    async def announce(self, op: "Operation", peer: int, claim: Claim) -> None:
        """Announce an operation to a peer, and say what concerns it."""
        rank = op.group.members[peer]
        await op.announce(peer, self.note(claim) if rank in self._node and (self.keeps or rank == self.keeper) else None)

    async def listen(self, op: "Operation", peer: int) -> None:
        """Wait for a peer's announcement, unless `claim` has, and `hear` it."""
        rank = op.group.members[peer]
        if rank != self.keeper:
            self.hear(rank, await op.cleared(peer))

    def unusable(self, where: str, name: str, error: Exception) -> ProtocolError:
        return ProtocolError(f"{where} {name}: the memory that rank {self.keeper} granted cannot be used: {error}")

    # --- what is there

    def lend(self, claim: Claim) -> tuple[np.ndarray, Release]:
        """The result's bytes, for this rank to compute with, and what releases them: on any thread, once, and at the latest when nobody has
        them any more. It is told whether to keep the memory for other results, which is the keeper's to decide."""
        assert claim.slot is not None
        # an array of its own, which all that are made of it keep: numpy refers to the last one that is over something else than an array
        view = np.frombuffer(claim.slot.segment.private.data[: claim.size], np.uint8)
        freed = weakref.finalize(view, self._freed.append, claim)
        freed.atexit = False

        def release(keep: bool) -> None:
            claim.unwanted = not keep
            freed()

        return view, release

    def close(self) -> None:
        with self._lock:
            for slot in list(self._slots):
                self._drop(slot)

    # --- under the lock

    def _release(self, claim: Claim) -> None:
        """This rank neither reads nor writes the slot any more."""
        if claim.slot is None:
            return
        claim.slot.segment.refresh()
        if self.keeps:
            claim.slot.unwanted = claim.unwanted
            self._on_released(self.keeper, (claim.serial,))
        elif claim.slot.id in self._slots:  # or the keeper has dropped it
            self._released[claim.slot.id] = claim.serial

    def _drop(self, slot: int) -> None:
        self._released.pop(slot, None)
        if slot in self._slots:
            self._slots.pop(slot).segment.close()

    def _open(self, grant: mesh_pb2.Grant) -> Segment:
        process = self._mesh.process(self.keeper)
        if process is None:
            raise OSError("this rank does not see it")
        try:
            return Segment(grant.size, (process, grant.descriptor, grant.inode))
        except Stranger as gone:
            raise LoanRevoked from gone

    # --- the keeper's (under the lock)

    def _grant(self, size: int) -> Claim:
        """Of nothing, if the node's ranks do not share memory, or there is none."""
        others = self._node - {self.keeper}
        if not others <= self._mesh.memory_peers or any(self._mesh.process(rank) is None for rank in others):
            return Claim(size)
        slot = self._find_free(size)
        if slot is None:
            try:
                slot = self._slots[self._next_id] = _Slot(self._next_id, size, Segment(size))
            except OSError as error:
                self._complain(size, error)
                return Claim(size)
            self._next_id += 1
        self._serial += 1
        slot.serial, slot.holders = self._serial, set(self._node)
        self._trim()
        return Claim(size, slot, slot.serial, list(self._dropped))

    def _complain(self, size: int, error: OSError) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.warning(
                "%s no memory in common (%s), wanted %d bytes: each rank of this node gathers into its own", self._where(), error, size
            )

    def _find_free(self, size: int) -> _Slot | None:
        """The smallest one that is large enough, and not much too large. It need not fit: where slots of one size were dropped to make some
        of another, and back again, the system would have all their pages to clear in each step of a training."""
        fitting = [slot for slot in self._slots.values() if not slot.holders and size <= slot.size <= _MOST_UNUSED * size]
        return min(fitting, key=lambda slot: slot.size, default=None)

    def _on_released(self, rank: int, serials: Collection[int]) -> None:
        for slot in self._slots.values():
            if slot.serial in serials:
                slot.holders.discard(rank)

    def _trim(self) -> None:
        """Drop the free slots that are unwanted, and the oldest ones while there are more, or larger ones together, than were in use
        at once."""
        for slot in [slot for slot in self._slots.values() if slot.unwanted and not slot.holders]:
            self._peak_bytes = self._peak_count = 0  # who needed them does not any more
            self._retire(slot)
        used = [slot.size for slot in self._slots.values() if slot.holders]
        self._peak_bytes, self._peak_count = max(self._peak_bytes, sum(used)), max(self._peak_count, len(used))
        total = sum(slot.size for slot in self._slots.values())
        for slot in [slot for slot in self._slots.values() if not slot.holders]:
            if total > self._peak_bytes or len(self._slots) > self._peak_count:
                total -= slot.size
                self._retire(slot)

    def _retire(self, slot: _Slot) -> None:
        self._drop(slot.id)
        self._dropped.append(slot.id)
