"""One collective on one rank."""

import asyncio
import concurrent.futures
import time
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardnet.errors import ProtocolError
from shardnet.flight import Flight, State
from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory import Loan
from shardnet.wire import Buffer, Chunk, InPlace

if TYPE_CHECKING:
    from shardnet.collectives.group import Group

Algorithm = Callable[["Operation"], Coroutine[Any, Any, None]]
Prelude = Callable[[], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Call:
    """What the caller asked for."""

    op: str  # all_gather, ...
    label: str  # what it is for, in the caller's words
    detail: str  # dtype, shape and whatever else must be equal on all ranks
    timeout_s: float
    on_the_wire: str  # `op`, except that a send and its receive have one name here, because their signatures must be equal

    @property
    def signature(self) -> str:
        """Equal on all ranks, or the collective is refused: `all_gather(float32 [4, 3]) of layer4.mlp`."""
        return f"{self.on_the_wire}({self.detail})" + (f" of {self.label}" if self.label else "")


@dataclass(slots=True, eq=False)
class Operation:
    """One collective on one rank, from the call to its result; ranks here are ranks of its group."""

    group: "Group"
    flight: Flight
    call: Call
    algorithm: Algorithm
    value: object  # the handle's result when the collective is done
    result: "concurrent.futures.Future[Any]"
    prelude: Prelude | None = None  # chunks that come for the operation are kept until it ends: the caller's data is not there yet
    deadline: float = 0.0  # by time.monotonic
    sink: Callable[[int, Chunk], None] | None = None  # set by the algorithm before it waits for anything
    waited_ns: int = 0  # time spent waiting for peers that had not entered it yet
    error: BaseException | None = None
    task: "asyncio.Task[None] | None" = None
    awaits_turn: bool = False  # on a channel: it has yet to get a turn to be announced; see [Note: turns]
    has_turn: bool = False
    started: bool = False  # the task has begun: only then does cancelling it run its cleanup
    takes_loans: bool = False  # the sink accepts lent chunks; set together with it
    ready: bool = False  # the sink is set and chunks that came early were delivered: new ones may be handed over directly
    _announced: defaultdict[int, deque[mesh_pb2.Announcement]] = field(default_factory=lambda: defaultdict(deque))
    _waiters: dict[int, "asyncio.Future[None]"] = field(default_factory=dict)
    _heard: set[int] = field(default_factory=set)  # peers whose announcement `cleared` has returned
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # a peer has announced it
    _loan: Loan | None = None  # lets peers read this rank's data where it lies
    _unannounced: set[int] = field(default_factory=set)  # peers that get the announcement with the first chunk of data
    _borrowers: set[int] = field(default_factory=set)  # peers that have not returned this rank's loan
    _lenders: set[int] = field(default_factory=set)  # peers whose loans this rank has yet to return
    _returned: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.call.timeout_s
        self.awaits_turn = bool(self.group.party.channel)

    @property
    def may_be_stuck(self) -> bool:
        """Always: a rank that has its neighbours' announcements may still wait for data that another rank holds up. Only asking tells."""
        return True

    @property
    def sequence(self) -> int:
        return self.flight.sequence

    @property
    def name(self) -> str:
        return self.flight.name

    def announcement(self, *, sends: int = 0, expects: int = 0) -> mesh_pb2.Announcement:
        return mesh_pb2.Announcement(signature=self.call.signature, send_bytes=sends, expect_bytes=expects)

    async def announce(self, peer: int, note: mesh_pb2.Announcement | None = None) -> None:
        """Tell a peer which collective this is and that the peer may send its data. `note` is about the node's common memory."""
        announcement = self.announcement()
        if note is not None:
            announcement.MergeFrom(note)
        await self.send(peer, announcement=announcement)

    def announce_with_data(self, peers: Sequence[int]) -> None:
        """Announce the collective to each of these peers with the first chunk of data that goes there, which costs no extra message."""
        self._unannounced.update(peers)

    async def cleared(self, peer: int) -> mesh_pb2.Announcement:
        """Wait until a peer has announced the same collective: it has got there and takes the data now.

        An announcement counts once: an algorithm of two phases waits twice, and its peers announce twice.
        """
        if not self._announced[peer]:
            start = time.perf_counter_ns()
            waiter = self._waiters[peer] = asyncio.get_running_loop().create_future()
            self.flight.state = State.WAITING
            await waiter
            self.waited(peer, start)
        self._heard.add(peer)
        return self._announced[peer].popleft()

    def waited(self, peer: int, start_ns: int) -> None:
        """Count the time since `start_ns` as time that a peer kept this rank waiting."""
        end = time.perf_counter_ns()
        self.waited_ns += end - start_ns
        self.group.telemetry.count_wait(self.group.members[peer], start_ns, end)

    async def announced(self, peer: int) -> None:
        """Wait until a peer has announced it, whether or not `cleared` has already returned that announcement."""
        while not self.has_announced(peer):
            await self.news()

    def has_announced(self, peer: int) -> bool:
        return bool(self._announced[peer]) or peer in self._heard

    async def news(self) -> None:
        """Wait until a peer announces it, or `look` is called."""
        self._news.clear()
        await self._news.wait()

    def look(self) -> None:
        """Wake what waits in `news`: something that it waits for has happened."""
        self._news.set()

    def begin_next_phase(self) -> None:
        """All peers have announced the first phase; each will announce the collective again for the next one."""
        self._heard.clear()

    @property
    def is_announced(self) -> bool:
        """Whether any peer has announced it."""
        return bool(self._heard) or any(self._announced.values())

    @property
    def unheard(self) -> int:
        """How many announcements nobody has waited for: a peer sent each of them a second time."""
        return sum(map(len, self._announced.values()))

    async def send(
        self,
        peer: int,
        block: int = 0,
        offset: int = 0,
        data: Buffer = b"",
        *,
        announcement: mesh_pb2.Announcement | None = None,
    ) -> None:
        """Send one chunk. `data` must not change until this returns."""
        control = None if announcement is None else mesh_pb2.Control(announcement=announcement)
        self.flight.bytes_sent += len(data)
        await self.group.send(self, (peer,), self._chunk(block, offset, data, control))

    async def send_all(self, peers: Sequence[int], block: int, offset: int, data: Buffer, *, frame: Buffer | None = None) -> None:
        """Send one chunk of data to several peers, as `send` does; `frame` is its encoded form, if known."""
        self.flight.bytes_sent += len(data) * len(peers)
        if self._unannounced.isdisjoint(peers):
            await self.group.send(self, peers, self._chunk(block, offset, data, frame=frame))
            return
        for peer in peers:
            await self.group.send(self, (peer,), self._chunk(block, offset, data, self._first_word(peer)))

    def _first_word(self, peer: int) -> mesh_pb2.Control | None:
        """The announcement, if the peer has yet to get it."""
        if peer not in self._unannounced:
            return None
        self._unannounced.discard(peer)
        return mesh_pb2.Control(announcement=self.announcement())

    async def lend_all(self, peers: Sequence[int], block: int, offset: int, data: Buffer) -> bool:
        """Send one chunk of data that must not change until `settle` returns or the operation has failed: a peer that can read this
        rank's memory reads it from where it lies. Returns whether all peers can. See [Note: loans]."""
        borrowers = self.group.borrowers.intersection(peers)
        if borrowers and self._loan is None:
            self._loan = Loan()
        for peer in borrowers:
            assert self._loan is not None
            self.flight.bytes_sent += len(data)
            self._borrowers.add(peer)
            self.group.lend(self, peer, self._chunk(block, offset, data, self._first_word(peer)), self._loan)
        if rest := [peer for peer in peers if peer not in borrowers]:
            await self.send_all(rest, block, offset, data)
        return not rest

    async def place_all(self, peers: Sequence[int], block: int, offset: int, size: int) -> None:
        """Tell peers on this node that a chunk's data is already in its place, in memory that they share with this rank."""
        self.flight.bytes_sent += size * len(peers)
        chunk = self._chunk(block, offset, b"", mesh_pb2.Control(placed=mesh_pb2.Placed(size=size)))
        chunk.lent = InPlace(size)
        await self.group.send(self, peers, chunk)

    async def settle(self) -> None:
        """Tell the lenders that this rank has read everything, and wait until the borrowers have read everything that it lent."""
        for peer in list(self._lenders):
            await self.return_loan(peer)
        while self._borrowers:
            self._returned.clear()
            await self._returned.wait()

    async def return_loan(self, lender: int) -> None:
        """Tell a peer that this rank has read everything that the peer lends, if it has lent anything."""
        if lender in self._lenders:
            self._lenders.discard(lender)
            await self.group.send(self, (lender,), self._chunk(0, 0, b"", mesh_pb2.Control(loan_returned=mesh_pb2.LoanReturned())))

    def revoke(self) -> None:
        """Give the memory back to the caller, who may now change it: a borrower discards what it reads there from now on."""
        if self._loan is not None:
            self._loan.revoke()

    def _chunk(self, block: int, offset: int, data: Buffer, control: mesh_pb2.Control | None = None, frame: Buffer | None = None) -> Chunk:
        return Chunk(self.group.epoch, self.group.id, self.sequence, block, offset, data, control, frame)

    def on_chunk(self, source: int, chunk: Chunk) -> None:
        """Take a chunk that a peer sent for this collective."""
        if chunk.control is not None and chunk.control.HasField("announcement"):
            self._on_announcement(source, chunk.control.announcement)
        if chunk.control is not None and chunk.control.HasField("loan_returned"):
            self._borrowers.discard(source)
            self._returned.set()
        if chunk.size and self.error is None:
            if self.sink is None or (chunk.lent is not None and not self.takes_loans):
                raise ProtocolError(f"rank {self.group.members[source]} sent data for {self.name} too early or in an unexpected form")
            if chunk.lent is not None and chunk.lent.returns:
                self._lenders.add(source)
            self.sink(source, chunk)

    def _on_announcement(self, source: int, announcement: mesh_pb2.Announcement) -> None:
        if announcement.signature != self.call.signature:
            self.group.mismatch(self, source, announcement.signature)
            return
        self._announced[source].append(announcement)
        self.look()
        waiter = self._waiters.pop(source, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
            if not self._waiters:
                self.flight.state = State.BEGUN

    def fail(self, error: BaseException) -> bool:
        """End it with an error on this rank. Returns whether `error` is the one that ends it: the first error stays."""
        if self.error is not None:
            return False
        self.error = error
        if self.task is not None and self.started and self.task is not asyncio.current_task():
            self.task.cancel()
        return True
