"""The mesh over gRPC: for each pair of ranks one stream per direction, each on a connection of its own, to one port per worker.

Every rank is connected to every other, not to its ring neighbours alone: so each sees for itself that a peer has
died, and a direct exchange needs no relay. A connection costs a socket and a ping a second.
"""

import asyncio
import concurrent.futures
import logging
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from shardnet.address import Address
from shardnet.config import Limits, Timeouts
from shardnet.credentials import Identity, Security
from shardnet.errors import PeerLost
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.printable import printable
from shardnet.topology import Topology
from shardnet.transport.base import Mesh, Receiver
from shardnet.transport.dialing import NOBODY
from shardnet.transport.hello import Hello, disagreement, terms_of
from shardnet.transport.http2 import Call, CallBroken
from shardnet.transport.mesh_service import MeshService
from shardnet.transport.options import HANDSHAKE_S
from shardnet.transport.outbox import Outbox
from shardnet.transport.shared_memory import Loan, Mailbox, MailboxView, Sharing
from shardnet.transport.vigil import attend, watchers_of
from shardnet.wire import Chunk

log = logging.getLogger(__name__)
PATIENCE_S = 10.0  # after this time users begin to wonder
ADVICE = (
    "all workers must be able to connect to the port of each worker; run `shardnet doctor` on each machine to find which ports are blocked"
)
FLUSH_S = 0.2  # how long an abort waits for the peers to take what was sent; living peers take it in milliseconds


class GrpcMesh(Mesh):
    """One rank's streams to and from its peers; thrown away when any member changes."""

    def __init__(
        self,
        job: str,
        topology: Topology,
        service: MeshService,
        security: Security,
        timeouts: Timeouts,
        limits: Limits,
        *,
        shared_memory: bool = True,
        lending: bool = True,
        terms: Mapping[str, object] | None = None,
        on_broken: Callable[[], None] | None = None,
        watched: bool = False,
    ) -> None:
        """shared_memory  whether this rank offers the others of its node a window; it looks into theirs in any case
        lending        whether ranks may also read data directly from each other's memory
        terms          settings that must be the same on all ranks, by name, in addition to `limits`; a rank with others is refused
        on_broken      called once, on the loop thread, when the mesh is no longer whole (`is_whole`); must not block
        watched        whether ranks watch each other, because no rendezvous does: see vigil.py
        """
        super().__init__(topology.rank, topology.world_size, topology.epoch)
        self.where = where = f"[rank {self.rank}/{self.world_size} epoch {self.epoch}]"
        self._job = job
        self._topology = topology
        self._service = service
        self._security = security
        self._timeouts = timeouts
        self._limits = limits
        self._shared_memory = shared_memory
        self._terms = terms_of({**asdict(limits), **(terms or {})})
        self._receiver: Receiver | None = None
        self._outboxes: dict[int, Outbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._inbound: dict[int, Call | None] = {}  # the streams of peers to this rank that are open; None: by grpcio
        self._departed: set[int] = set()  # peers that said goodbye
        self._lost: dict[int, str] = {}
        self._last_words: dict[int, str] = {}  # of peers that are about to be lost, or are
        self._changed = asyncio.Event()  # one of the three above has changed, or `attending`
        self._formed = False
        self._closing = False
        self.closing = asyncio.Event()  # set when its streams are closed
        self._watched = watched
        self.attending = Counter[int]()  # open Attend calls, by peer; a peer's next one may come before its last one is found broken
        self._doubted: set[int] = set()  # peers that had such a call, and have none now
        self._broken = False  # is_whole is false for good
        self._on_broken = on_broken
        place = topology.me.local_rank
        self._sharing = Sharing(where, self.epoch, place, topology.neighbours, limits, self._put, self._put_now, lending=lending)
        self._aborting: concurrent.futures.Future[None] | None = None

    # --- opening

    async def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        for peer in self.peers:
            hello = Hello(self._job, self.epoch, self.rank, peer, self._topology.me.incarnation, self._terms)
            member = self._topology.members[peer]
            outbox = self._outboxes[peer] = Outbox(member, hello, self._security, self._timeouts, self._limits)
            self._spawn(self._run(outbox))
        await self._service.attach(self)
        why = "not connected yet"  # a peer that gave up first is lost, but those that it waited for are the cause
        notice = asyncio.get_running_loop().call_later(PATIENCE_S, self._say_who_is_not_connected)
        try:
            await self._wait(lambda: bool(self._lost) or not self._absent(), self._timeouts.connect_s)
        except TimeoutError:
            why = f"no connection within {self._timeouts.connect_s:g} s"
        finally:
            notice.cancel()
        if (absent := self._absent()) or self._lost:
            advice = "" if self._lost else f"; {ADVICE}"
            self._lost = {**{peer: f"{why}{self._obstacle(peer)}" for peer in absent}, **self._lost}
            names = "; ".join(f"rank {peer} ({self.address(peer)}): {why}" for peer, why in sorted(self._lost.items()))
            raise PeerLost(f"{self.where} the mesh could not be formed: {names}{advice}", min(self._lost))
        self._formed = True
        if self._watched:
            await self._have_it_watched()
        if self._shared_memory:
            await self._sharing.open(HANDSHAKE_S)

    def _say_who_is_not_connected(self) -> None:
        names = "; ".join(f"rank {peer} ({self.address(peer)}){self._obstacle(peer)}" for peer in self._absent())
        log.warning("%s no connection yet with %s", self.where, names)

    def _obstacle(self, peer: int) -> str:
        """What is known about the reason why there is no connection with a peer."""
        member, own = self._topology.members[peer], self._topology.me
        outbox = self._outboxes[peer]
        if outbox.accepted:
            there, reason = own, f": this rank can call it, but it does not reach this rank at {own.address}"
        else:
            there, reason = member, f": {outbox.problem}" if outbox.problem else ""
        if member.node != own.node and Address.parse(there.address).is_loopback:
            machine, worker = ("that", "the worker there") if there is member else ("this", "this worker")
            reason += f", and this loopback address can be reached only on {machine} machine (start {worker} with --listen HOST)"
        return reason

    async def _have_it_watched(self) -> None:
        """Call the ranks that watch this one, and wait until they do, so that they notice from now on if this rank fails. Wait only for a
        limited time: it works without them, too."""
        calls = []
        for peer in watchers_of(self._topology):
            calls.append(watched := asyncio.Event())
            hello = Hello(self._job, self.epoch, self.rank, peer, self._topology.me.incarnation, self._terms)
            common = self._topology.members[peer], hello, self._security, self._timeouts, self._limits
            self._spawn(attend(*common, on_watched=watched.set, is_over=partial(self._lost_or_left, peer)))
        with suppress(TimeoutError):
            async with asyncio.timeout(HANDSHAKE_S):
                for watched in calls:
                    await watched.wait()

    def _lost_or_left(self, peer: int) -> bool:
        return self._closing or peer in self._lost or peer in self._departed

    @property
    def is_whole(self) -> bool:
        """Whether the mesh is formed, no peer has been lost or has left since then, and this rank has not begun to leave."""
        return self._formed and not self._broken

    def _break(self) -> None:
        if self.is_whole and self._on_broken is not None:
            self._on_broken()
        self._broken = True

    def _absent(self) -> list[int]:
        return [peer for peer in self.peers if peer not in self._inbound or not self._outboxes[peer].accepted]

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, outbox: Outbox) -> None:
        if (why := await outbox.run(self._changed.set)) is not None:
            outbox.fail(why)  # after a goodbye, too: otherwise a sender that waits for room in it would wait for ever
            self.lose(outbox.peer, why)

    def is_silent(self, rank: int) -> bool:
        return rank in self._outboxes and self._outboxes[rank].is_silent

    def moved_bytes(self, rank: int) -> int:
        calls = self._inbound.get(rank), self._outboxes[rank].call
        return sum(call.signs_of_life for call in calls if call is not None)

    def suspect(self, rank: int, reason: str) -> None:
        """Another witness takes a peer for gone: [Note: two witnesses] in pulse.py. Until the mesh is formed it is the only witness."""
        if not self._formed:
            self.lose(rank, reason)
        elif rank in self._outboxes:
            self._outboxes[rank].suspect()

    @contextmanager
    def attended(self, peer: int) -> Iterator[None]:
        """Hold this while this rank watches a peer at the peer's request. When that ends, this rank tells all others, unless the peer is
        lost or has left."""
        self.attending[peer] += 1
        if peer in self._doubted:
            self._doubted.discard(peer)
            self._tell_of(peer, gone=False)
        try:
            yield
        finally:
            self.attending[peer] -= 1
            self._changed.set()
            if not self.attending[peer] and self._formed and not self._lost_or_left(peer):
                self._doubted.add(peer)
                self._tell_of(peer, gone=True)

    def _tell_of(self, peer: int, *, gone: bool) -> None:
        said = mesh_pb2.Control(suspicion=mesh_pb2.Suspicion(rank=peer, gone=gone))
        self._hear(said.suspicion)
        for other in self.peers:
            if other != peer:
                with suppress(PeerLost):
                    self._put_now(other, Chunk(self.epoch, 0, 0, control=said))

    def _hear(self, said: mesh_pb2.Suspicion) -> None:
        """A rank that watches another one has lost it, or found it again."""
        if (outbox := self._outboxes.get(said.rank)) is not None:
            (outbox.suspect if said.gone else outbox.trust)()

    # --- traffic

    @property
    def memory_peers(self) -> frozenset[int]:
        return self._sharing.readers

    @property
    def shares_memory(self) -> bool:
        return True  # a rank that cannot share memory simply has no readers

    @property
    def borrowers(self) -> frozenset[int]:
        return self._sharing.borrowers

    @property
    def mailbox(self) -> Mailbox | None:
        return self._sharing.mailbox

    @property
    def mailboxes(self) -> Mapping[int, MailboxView]:
        return self._sharing.mailboxes

    def process(self, peer: int) -> int | None:
        return self._sharing.process(peer)

    def carries(self, peer: int, chunk: Chunk) -> bool:
        return self._sharing.carries(peer, chunk)

    def lend(self, peer: int, chunk: Chunk, loan: Loan) -> None:
        self._sharing.lend(peer, chunk, loan)

    async def send(self, peer: int, chunk: Chunk) -> None:
        await self.send_all((peer,), chunk)

    async def send_all(self, peers: Sequence[int], chunk: Chunk) -> None:
        near = [peer for peer in peers if self._sharing.carries(peer, chunk)]
        if near:
            await self._sharing.send(near, chunk)
        for peer in peers:
            if peer not in near:
                await self._put(peer, chunk)

    async def _put(self, peer: int, chunk: Chunk) -> None:
        await self._outboxes[peer].put(chunk)

    def _put_now(self, peer: int, chunk: Chunk) -> None:
        self._outboxes[peer].put_now(chunk)

    def refuse(self, hello: Hello, identity: Identity | None, *, attends: bool = False) -> str | None:
        """Why a caller, which has proved to be `identity`, may not open a stream (or an Attend call) to this rank; None if it may."""
        if hello.job != self._job:
            return f"this worker belongs to job {self._job!r}, the caller to {hello.job!r}"
        if hello.epoch != self.epoch or hello.target != self.rank:
            return f"this worker is rank {self.rank} of epoch {self.epoch}, the caller wants rank {hello.target} of epoch {hello.epoch}"
        if hello.source not in self.peers or hello.incarnation != self._topology.members[hello.source].incarnation:
            return f"the caller says that it is rank {hello.source}, but it is not the worker that has this rank"
        if (placed := self._topology.members[hello.source].identity) != (identity.uri if identity else ""):
            return f"the caller is {identity or NOBODY}, but rank {hello.source} is {placed or NOBODY}"
        if (difference := disagreement(hello.terms, self._terms)) is not None:
            return f"the settings of rank {hello.source} and rank {self.rank} differ, but must be the same on all ranks: {difference}"
        if not attends and hello.source in self._inbound:
            return f"rank {hello.source} already has an open stream to this rank"
        return None

    @contextmanager
    def connected(self, peer: int, call: Call | None = None) -> Iterator[None]:
        """Hold this while a peer's stream to this rank is open. If it ends without a goodbye, the peer is lost."""
        self._inbound[peer] = call
        self._changed.set()
        why = "its connection broke"
        try:
            yield
        except CallBroken as error:
            why = str(error)
            raise
        finally:
            self.lose(peer, why)

    def receive(self, peer: int, chunk: Chunk) -> None:
        assert self._receiver is not None
        if chunk.control is not None and chunk.epoch == self.epoch:  # nothing from another epoch counts, not even a goodbye
            kind = chunk.control.WhichOneof("kind") or ""
            if kind.startswith("window_") or chunk.control.HasField("window_piece") or chunk.control.HasField("loan"):
                self._sharing.receive(peer, chunk, partial(self._receiver.on_chunk, peer))
                return
            if kind == "suspicion":
                self._hear(chunk.control.suspicion)
                return
            if kind == "last_words":
                # only the end of the stream is the loss: collectives whose data has just arrived must have their turn on the loop before
                self._last_words[peer] = printable(chunk.control.last_words.why)
                return
            if kind == "goodbye":
                self._departed.add(peer)
                self._changed.set()
                self._break()
                self._sharing.leave(peer)
        self._receiver.on_chunk(peer, chunk)

    def lose(self, peer: int, why: str) -> None:
        """A peer's stream broke. If there were last words, they say better why. Only the first report counts, and none after a goodbye or
        while closing."""
        if peer in self._lost or peer in self._departed or self._closing:
            return
        why = self._last_words.get(peer, why)
        self._lost[peer] = why
        self._changed.set()
        self._break()
        if peer in self._outboxes:  # there are none yet if the rendezvous reports a loss before the streams are opened
            self._outboxes[peer].fail(why)
        self._sharing.lose(peer)
        if self._receiver is not None:
            self._receiver.on_lost(peer, why, told=peer in self._last_words)

    def address(self, rank: int) -> str:
        return self._topology.members[rank].address

    # --- closing

    async def aclose(self) -> None:
        self._break()
        if not self._closing and self._receiver is not None:
            goodbye = Chunk(self.epoch, 0, 0, control=mesh_pb2.Control(goodbye=self._receiver.goodbye()))
            async with asyncio.TaskGroup() as group:
                for peer in self.peers:
                    group.create_task(self._take_leave(peer, goodbye))
        try:
            if self._aborting is not None:
                await asyncio.wrap_future(self._aborting)  # first: it lets the reason go out to the peers
        finally:
            await self._close_streams()

    async def _take_leave(self, peer: int, goodbye: Chunk) -> None:
        """Exchange goodbyes with one peer, or leave without its goodbye if none comes within drain_s.

        As long as the peer still takes some of the bytes that were sent to it, wait on: over a slow link the last collective may end
        here long before it can end there.
        """
        leaving = asyncio.ensure_future(self._exchange_goodbyes(peer, goodbye))
        try:
            left, before = self._outboxes[peer].outgoing_bytes, math.inf
            while left < before and not leaving.done():
                await asyncio.wait({leaving}, timeout=self._timeouts.drain_s)
                left, before = self._outboxes[peer].outgoing_bytes, left
            if leaving.done():
                leaving.result()
        finally:
            leaving.cancel()
            await asyncio.wait({leaving})

    async def _exchange_goodbyes(self, peer: int, goodbye: Chunk) -> None:
        outbox = self._outboxes[peer]
        with suppress(PeerLost):
            await outbox.put(goodbye)
            outbox.finish()
            await self._wait(lambda: peer in self._departed or peer in self._lost, None)

    def abort(self, why: str = "") -> None:
        self._closing = True  # at once: no goodbye may follow
        self._aborting = LoopThread.shared().run(self._abort(why))

    async def _abort(self, why: str) -> None:
        """Close, but first let the queued messages go out: they tell the peers why."""
        self._break()
        if why:
            for peer in self.peers:
                with suppress(PeerLost):
                    self._put_now(peer, Chunk(self.epoch, 0, 0, control=mesh_pb2.Control(last_words=mesh_pb2.LastWords(why=why))))
        await asyncio.gather(*(outbox.flush(FLUSH_S) for outbox in self._outboxes.values()))
        await self._close_streams()

    async def _close_streams(self) -> None:
        self._closing = True
        self.closing.set()
        if self._service.mesh is self:
            await self._service.attach(None)
        for outbox in self._outboxes.values():
            outbox.fail("this rank has closed its connections")
        self._sharing.close()
        for task in self._tasks:
            task.cancel()  # one may still try to connect
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _wait(self, condition: Callable[[], bool], timeout_s: float | None) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()
