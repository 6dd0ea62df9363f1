"""`Commons`: memory that the ranks of one node share, so that a result which all of them gather is there once.

[Note: one buffer a node] If a collective has the same result on all ranks of a node, they write it together into one piece of shared
memory, a slot: each rank its own block, and each carrier the blocks that come from other nodes. No rank copies what another one has
written; instead of sending a chunk, a rank only tells its neighbours that the chunk is in its place.

One rank, the keeper, says which slot to use, with its announcement or letter; the others wait for that before they write.
The keeper grants a slot again only when every rank of the node has released it. So a rank that runs ahead cannot
overwrite what another one still reads: the keeper makes another slot. Later it drops slots beyond the most that were ever in use at once,
and slots that it has released for good.
Ranks tell the keeper which grants they have released with their announcements and letters, which costs no extra message. They repeat it
until the keeper has granted that slot again, or dropped it: a collective that has ended well here may have failed there. Every grant has a
serial number, so a repeated or late message does no harm. If a collective fails on the keeper, it never grants that slot again, because it
cannot know which ranks have it.

Each rank computes with a private (copy-on-write) mapping of a slot: only that rank sees what it writes there, and only until it
releases the slot.
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

_MOST_UNUSED = 2  # a result may be given a slot of at most this many times its own size


@dataclass(slots=True, eq=False)
class _Slot:
    id: int
    size: int  # bytes
    segment: Segment
    serial: int = 0  # of its last grant
    holders: set[int] = field(default_factory=set)  # ranks that may still read or write it; known to the keeper
    unwanted: bool = False  # the keeper released its last grant for good: it has no more use for so much memory; known to the keeper


@dataclass(slots=True, eq=False)
class Claim:
    """One rank's share in one grant, or in none; lives as long as its collective."""

    size: int = 0  # bytes of the result, which lies at the beginning of the slot
    slot: _Slot | None = None
    serial: int = 0
    told: list[int] = field(default_factory=list)  # about other slots: the keeper tells which it has dropped, others what they released
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

    Safe to use from any thread, except the methods that wait for announcements, which run on the loop thread. See [Note: one buffer a
    node].
    """

    def __init__(self, mesh: Mesh, node: frozenset[int], where: Callable[[], str]) -> None:
        """`where` gives the prefix of log lines."""
        self._mesh = mesh
        self._where = where
        self._node = node
        self.keeper = min(node)
        self._freed: deque[Claim] = deque()  # claims that this rank no longer needs; any thread adds them, even in the middle of anything
        self._lock = threading.Lock()  # over what follows
        self._slots: dict[int, _Slot] = {}  # by id, oldest first
        self._next_id = 0
        self._serial = 0
        self._peak_bytes = 0  # the most that was granted at once
        self._peak_count = 0  # the most slots that were in use at once
        self._has_complained = False
        self._dropped: list[int] = []  # ids of slots that the others may not know to be gone
        self._released: dict[int, int] = {}  # by slot, the serial of a grant that the keeper may not know to be released

    @property
    def keeps(self) -> bool:
        """Whether this rank is the keeper."""
        return self.keeper == self._mesh.rank

    # --- a collective, by letters

    def begin(self, size: int) -> Claim:
        """This rank's claim in a collective whose result has `size` bytes; on the keeper with a slot for it, if there is memory."""
        with self._lock:
            while self._freed:
                self._release(self._freed.popleft())
            return self._grant(size) if self.keeps else Claim(size, told=list(self._released.values()))

    def note(self, claim: Claim) -> mesh_pb2.Announcement:
        """The claim as a message: from the keeper to the node its grant, from the others to the keeper what they have released."""
        if not self.keeps:
            return mesh_pb2.Announcement(released=claim.told)
        if claim.slot is None:
            return mesh_pb2.Announcement()
        segment = claim.slot.segment
        place = {"id": claim.slot.id, "size": claim.slot.size, "descriptor": max(segment.descriptor, 0), "inode": segment.inode}
        return mesh_pb2.Announcement(grant=mesh_pb2.Grant(serial=claim.serial, dropped=claim.told, **place))

    def take(self, claim: Claim, announcement: mesh_pb2.Announcement) -> None:
        """Take the keeper's message: the slot, if it grants one.

        Raises LoanRevoked if the keeper is gone, which its stream is about to show, and OSError or ValueError if the slot cannot be mapped.
        """
        if not announcement.HasField("grant"):
            return
        grant = announcement.grant
        if grant.size < claim.size:
            raise ValueError(f"it has {grant.size} bytes, and {claim.size} are needed")
        with self._lock:
            for each in grant.dropped:
                self._drop(each)
            if grant.id not in self._slots:
                self._slots[grant.id] = _Slot(grant.id, grant.size, self._open(grant))
            self._released.pop(grant.id, None)
            claim.slot, claim.serial = self._slots[grant.id], grant.serial

    def hear(self, rank: int, announcement: mesh_pb2.Announcement) -> None:
        """Take another rank's message to the keeper: what it has released."""
        with self._lock:
            self._on_released(rank, set(announcement.released))

    def end(self, claim: Claim) -> None:
        """The collective has ended well, so all ranks have mapped the slot, and know which slots were dropped."""
        with self._lock:
            if claim.slot is not None:
                claim.slot.segment.close()
            self._dropped = [each for each in self._dropped if each not in claim.told]

    def fail(self, claim: Claim) -> None:
        """The collective has failed: never grant the slot again (keeper), or release it (others)."""
        with self._lock:
            if claim.slot is not None and self.keeps:
                self._retire(claim.slot)
            else:
                self._release(claim)

    # --- the same, by announcements

    async def claim(self, op: "Operation", size: int) -> Claim:
        """`begin`, and then, on all ranks except the keeper, `take` its announcement.

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
        """Announce an operation to a peer, with the part of the claim that concerns it."""
        rank = op.group.members[peer]
        await op.announce(peer, self.note(claim) if rank in self._node and (self.keeps or rank == self.keeper) else None)

    async def listen(self, op: "Operation", peer: int) -> None:
        """Wait for a peer's announcement and `hear` it, except the keeper's, which `claim` has taken."""
        rank = op.group.members[peer]
        if rank != self.keeper:
            self.hear(rank, await op.cleared(peer))

    def unusable(self, where: str, name: str, error: Exception) -> ProtocolError:
        return ProtocolError(f"{where} {name}: the memory that rank {self.keeper} granted cannot be used: {error}")

    # --- what is there

    def lend(self, claim: Claim) -> tuple[np.ndarray, Release]:
        """The result's bytes, for this rank to compute with, and a function that releases them: on any thread, once, and at the latest when
        nobody refers to them any more. Its argument says whether to keep the memory for other results; only the keeper's counts."""
        assert claim.slot is not None
        # an array of its own, which all arrays made of it keep alive: numpy's `base` is the last one over something other than an array
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
        """Release a claim's slot, which this rank neither reads nor writes any more."""
        if claim.slot is None:
            return
        claim.slot.segment.refresh()
        if self.keeps:
            claim.slot.unwanted = claim.unwanted
            self._on_released(self.keeper, (claim.serial,))
        elif claim.slot.id in self._slots:  # otherwise the keeper has dropped it
            self._released[claim.slot.id] = claim.serial

    def _drop(self, slot: int) -> None:
        self._released.pop(slot, None)
        if slot in self._slots:
            self._slots.pop(slot).segment.close()

    def _open(self, grant: mesh_pb2.Grant) -> Segment:
        process = self._mesh.process(self.keeper)
        if process is None:
            raise OSError("this rank cannot see the process of that rank")
        try:
            return Segment(grant.size, (process, grant.descriptor, grant.inode))
        except Stranger as gone:
            raise LoanRevoked from gone

    # --- the keeper's (under the lock)

    def _grant(self, size: int) -> Claim:
        """Grant a slot; an empty claim if the node's ranks do not share memory, or there is no memory."""
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
                "%s no shared memory (%s) for %d bytes; each rank of this node gathers into its own memory instead",
                self._where(),
                error,
                size,
            )

    def _find_free(self, size: int) -> _Slot | None:
        """The smallest free slot that is large enough, and not much too large. It need not fit exactly: if slots of one size were dropped
        to make slots of another size, and back again, the system would have to clear all their pages in each step of a training."""
        fitting = [slot for slot in self._slots.values() if not slot.holders and size <= slot.size <= _MOST_UNUSED * size]
        return min(fitting, key=lambda slot: slot.size, default=None)

    def _on_released(self, rank: int, serials: Collection[int]) -> None:
        for slot in self._slots.values():
            if slot.serial in serials:
                slot.holders.discard(rank)

    def _trim(self) -> None:
        """Drop the free slots that are unwanted, and then the oldest free ones, while the slots are more, or larger together, than were
        ever in use at once."""
        for slot in [slot for slot in self._slots.values() if slot.unwanted and not slot.holders]:
            self._peak_bytes = self._peak_count = 0  # whatever needed that much memory does not need it any more
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
