"""Between one mesh and the groups that share it: routes chunks, owns the tasks, remembers which ranks are lost.

[Note: the cause] When a rank dies, each survivor notices it by itself, but not at the same moment. The first survivor that notices may
itself be gone before the last one does, and the last one would then take that survivor for the dead rank. So a rank that loses another
one tells all others at once which one. A rank that later loses the rank that told them blames the one that was named. This message
changes no state: each rank decides by its own connection whether another one is lost.

[Note: forked children] A child of `os.fork`, such as a worker of a DataLoader or of a Pool, has a copy of its parent's memory and the same
mappings and descriptors, but none of its threads. The other ranks would take the child's letters for its parent's, and nothing that the
child handed to the loop thread would ever be done. So for a child everything is closed from the start. That includes the rounds that were
under way: whoever asks for a round does its work, so a child with its parent's handle would read the letters in its parent's place,
acknowledge them, and keep the result for itself, and its parent would wait for letters that others have been written over. A child
does no work of a round, takes none of its locks, which threads that it has not got may hold for ever, and can get only what had ended.
"""

import asyncio
import hashlib
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import islice, permutations
from typing import Any
from weakref import WeakSet

from shardnet.collectives.any_source import AnySource
from shardnet.collectives.commons import Commons
from shardnet.collectives.early import Early
from shardnet.collectives.group import Group
from shardnet.collectives.letters.attendant import Attendant
from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.letters.round import Round
from shardnet.collectives.route import Nodes, Routing
from shardnet.collectives.turns import Turns
from shardnet.collectives.watch import Watch
from shardnet.config import Limits
from shardnet.errors import ClosedError, InheritedError, ProtocolError, ShardnetError
from shardnet.loop import LoopThread
from shardnet.pb import mesh_pb2
from shardnet.printable import printable
from shardnet.telemetry import Telemetry
from shardnet.transport.base import Mesh
from shardnet.transport.shared_memory import Loan
from shardnet.wire import Chunk, InPlace

WORLD = 0  # group id of all ranks
_RETIRED_TOLD = 4096  # channels: about 60 kB of a goodbye
_LOOKED_AT = 4  # left groups to look at whenever a group is made: more than one, so that their number does not grow
_END_S = 2.0  # the longest wait for threads that end with the mesh: a peer that hangs may hold one up
_boards = WeakSet["Switchboard"]()  # of this process
MAX_STALE = 4096  # chunks in a row: 8 GiB of late data; a healthy peer has far less on its way when a collective fails


class Switchboard:
    """Everything that one rank's groups share; lives as long as the mesh. Runs on the loop thread."""

    def __init__(
        self, mesh: Mesh, telemetry: Telemetry, limits: Limits, suspect_s: float, nodes: Nodes = (), routing: Routing = Routing.AUTO
    ) -> None:
        """`suspect_s` is how long a collective waits before a warning says which ranks it waits for."""
        self.mesh = mesh
        self.telemetry = telemetry
        self.limits = limits
        self.nodes = nodes or (tuple(range(mesh.world_size)),)  # global ranks by node
        self.routing = routing
        self.loop = LoopThread.shared()
        self.watch = Watch(self, suspect_s)
        self.lost: dict[int, str] = {}  # global rank -> reason
        self.at_loss: list[Callable[[int], object]] = []  # called with the global rank that is lost; loop thread, like the next ones
        # called when all collectives have ended, with whether `abort` ended them; each returns futures for the threads yet to end
        self.at_end: list[Callable[[bool], list[asyncio.Future[None]]]] = []
        self._causes: dict[int, int] = {}  # global rank -> the one that it lost first; see [Note: the cause]
        self._last_words: dict[int, str] = {}  # global rank -> why it has ended, as it said itself
        self.receivers = set[AnySource]()  # those with a receive that has no source yet
        self._lock = threading.Lock()  # over the next two: groups are made on any thread
        self._made: dict[tuple[tuple[int, ...], str], int] = {}  # how often a group of these members was made for this purpose
        self._commons: dict[frozenset[int], Commons] = {}
        self._correspondents: frozenset[tuple[int, int]] = frozenset()  # pairs that read each other's mailbox; all ranks know them
        self._lenders: frozenset[tuple[int, int]] = frozenset()  # the same for each other's memory
        self._attendant: Attendant | None = None  # if there are correspondents
        # by id, how far each channel was when it was retired, even if it is in use again; changed on the loop thread only
        self._retired: dict[int, int] = {}
        self._groups: dict[int, Group] = {}  # by id; changed on the loop thread only, like everything that follows
        self._left: dict[int, Group] = {}  # those of them that this rank has left, but some other rank has not
        self._over = set[int]()  # ids of groups that all ranks have left
        self._goodbyes: dict[int, dict[int, int]] = {}  # for each rank that said goodbye: how far it was, by group
        self._unknown = Early(limits)  # chunks for groups that this rank has not made yet, by group id
        self.turns = Turns(limits)
        self._stale = Counter[int]()  # chunks in a row that were dropped, by sender
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.is_inherited = False  # this process is a fork of the one that made it; see [Note: forked children]
        self._closing = asyncio.Lock()
        self.world = self._add(Group(self, WORLD, tuple(range(mesh.world_size))))
        _boards.add(self)

    # --- groups (any thread)

    def group(self, members: tuple[int, ...], purpose: str = "", telemetry: Telemetry | None = None) -> Group:
        """A new group of these global ranks. Its id follows from its members, its purpose, and how many such groups were made before. So
        all ranks agree on it if they make the groups of one purpose in the same order.

        Its work is counted in `telemetry`, or else in this rank's.
        """
        with self._lock:
            self._made[members, purpose] = again = self._made.get((members, purpose), 0) + 1
        return self._add(Group(self, group_id(members, purpose, again), members, telemetry, known=False))

    def channel(self, pair: tuple[int, int], purpose: str, title: str) -> Group:
        """A group of these two global ranks. If it was retired, it goes on where it was."""
        number = group_id(pair, purpose, 1)
        if (known := self._groups.get(number)) is not None:  # it was made before, but a Ctrl-C kept it from the caller
            return known
        return self._add(Group(self, number, pair, channel=title, first=self._retired.get(number, 0)))

    def retire(self, group: Group) -> bool:
        """If a channel is idle, keep only its position; return whether it was idle. See [Note: idle channels] in channels.py. Loop
        thread."""
        if self._groups.get(group.id) is not group or not group.is_idle:
            return False
        del self._groups[group.id]
        self._retired.pop(group.id, None)  # so that the channel retired last is the last entry
        self._retired[group.id] = group.position
        return True

    def leave(self, group: Group) -> None:
        """Note that this rank begins nothing in a group any more. See [Note: left groups] in farewell.py. Loop thread."""
        if not self._closed and not self.settle(group):
            self._left[group.id] = group

    def settle(self, group: Group) -> bool:
        """Forget a group if it is over on all ranks; return whether it is. Loop thread."""
        if group.farewell.settle():
            self._left.pop(group.id, None)
            for each in (*group.channels.groups, group):
                self._groups.pop(each.id, None)
                self._over.add(each.id)
            if self.mesh.mailbox is not None:
                self.mesh.mailbox.withdraw(group.id)  # a rank that has not read its letters never will
        return group.id in self._over

    def commons(self, node: frozenset[int]) -> Commons:
        """The memory shared by these ranks, which are this one and others on its node."""
        with self._lock:
            if node not in self._commons:
                self._commons[node] = Commons(self.mesh, node, self.where)
            return self._commons[node]

    def wake_receivers(self) -> None:
        """Make the receives from any source look again. Loop thread."""
        for each in self.receivers:
            each.wake()  # its receives only look later, so `receivers` does not change during this loop

    async def correspond(self, node: tuple[int, ...], gather: Callable[[list[bool]], Awaitable[list[list[bool]]]]) -> None:
        """Find out which ranks of this node can read each other's mailboxes, and each other's memory. Called before anything else.

        `gather` gives every rank's list to all of them: whose mailboxes it can read, then which ranks can read its memory.
        """
        mesh = self.mesh
        reads = [mesh.mailbox is not None and rank in mesh.mailboxes for rank in node]
        rows = await gather(reads + [rank in mesh.borrowers and mesh.process(rank) is not None for rank in node])
        self._correspondents = _mutual(node, [row[: len(node)] for row in rows])
        self._lenders = _mutual(node, [row[len(node) :] for row in rows])
        if self._correspondents:
            self._attendant = Attendant(f"shardnet-attendant-{self.mesh.rank}")

    def mail(self, group: Group) -> Mail | None:
        """A group's access to its members' mailboxes, if each member can read those of all others."""
        if group.size == 1 or any(pair not in self._correspondents for pair in permutations(group.members, 2)):
            return None
        assert self.mesh.mailbox is not None
        assert self._attendant is not None
        views = {rank: self.mesh.mailboxes[group.members[rank]] for rank in group.peers}
        processes = {rank: process for rank in group.peers if (process := self.mesh.process(group.members[rank])) is not None}
        lends = group.route.nodes == 1 and self._lenders.issuperset(permutations(group.members, 2))
        return Mail(group, self.mesh.mailbox, views, self._attendant, processes if lends else {})

    @property
    def groups(self) -> list[Group]:
        """All groups that this rank has made and not forgotten. Loop thread."""
        return list(self._groups.values())

    def _add(self, group: Group) -> Group:
        self.loop.call(self._introduce, group)  # before anything that is called on the group
        return group

    def _introduce(self, group: Group) -> None:
        for left in list(islice(self._left.values(), _LOOKED_AT)):
            del self._left[left.id]
            self.leave(left)  # puts it after the others, if some rank still uses it
        self._groups[group.id] = group
        group.first_contact.greet()
        for source, chunk in self._unknown.take(group.id):
            group.on_chunk(source, chunk)
        if self.is_impaired:
            group.rounds.inspect()

    # --- outgoing

    async def send_all(self, peers: Sequence[int], chunk: Chunk) -> None:
        await self.mesh.send_all(peers, chunk)

    def lend(self, peer: int, chunk: Chunk, loan: Loan) -> None:
        self.mesh.lend(peer, chunk, loan)

    def post(self, peer: int, chunk: Chunk) -> None:
        """Send a control message without waiting for it. It is dropped if the peer is gone."""
        if peer not in self.lost:
            self.spawn(self._post(peer, chunk))

    async def _post(self, peer: int, chunk: Chunk) -> None:
        try:
            await self.mesh.send(peer, chunk)
        except ShardnetError:
            return

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Start a task that this switchboard owns: it is awaited or cancelled when the switchboard closes."""
        task = self.loop.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- incoming (shardnet.transport.base.Receiver)

    def on_chunk(self, source: int, chunk: Chunk) -> None:
        before = self.telemetry.stale_chunks
        self._on_chunk(source, chunk)
        self._stale[source] = self._stale[source] + 1 if self.telemetry.stale_chunks > before else 0
        if self._stale[source] > MAX_STALE:
            raise ProtocolError(f"rank {source} has sent {MAX_STALE} chunks in a row for collectives or epochs that are over")

    def _on_chunk(self, source: int, chunk: Chunk) -> None:
        if chunk.control is not None and chunk.control.HasField("placed"):
            chunk.lent = InPlace(chunk.control.placed.size)
        if chunk.epoch != self.mesh.epoch:
            self.telemetry.count_stale()
        elif chunk.control is not None and chunk.control.HasField("loss"):
            self._hear_loss(source, chunk.control.loss)
        elif chunk.control is not None and chunk.control.HasField("goodbye"):
            self._on_goodbye(source, chunk.control.goodbye)
        else:
            group = self._groups.get(chunk.group)
            if chunk.control is not None and chunk.control.HasField("abort") and (group is None or group.party.channel):
                self._acknowledge_abort(source, chunk.group)
            if group is not None:
                group.on_chunk(source, chunk)
            else:
                self._on_chunk_of_none(source, chunk)

    def waits_in(self, *, but: int) -> str:
        """The oldest collective in which this rank may be stuck, of all groups except `but`; empty: there is none. A receive may rightly
        stay open for long, so a channel's operation is named only if there is nothing else."""
        flights = [each.flight for group in self.groups if group.id != but for each in group.under_way if each.may_be_stuck]
        entered = [flight for flight in flights if flight.entered_ns]
        oldest = min(entered, key=lambda flight: (bool(flight.party.channel), flight.entered_ns), default=None)
        if oldest is None:
            return ""
        asked = self._groups.get(but)
        if asked is not None and asked.id != WORLD and asked.party.members == oldest.party.members and not oldest.party.channel:
            return f"{oldest.name} of another group of the same ranks"  # two models of one class have units of the same names
        return oldest.full_name

    def _on_chunk_of_none(self, source: int, chunk: Chunk) -> None:
        """Handle a chunk whose group is retired, or which this rank has not made yet and where it has entered nothing."""
        position, control = self._retired.get(chunk.group, 0), chunk.control or mesh_pb2.Control()
        if control.HasField("probe"):
            reply = mesh_pb2.ProbeReply(
                id=control.probe.id, entered=chunk.sequence < position, next_sequence=position, waits_in=self.waits_in(but=chunk.group)
            )
            self.post(source, Chunk(chunk.epoch, chunk.group, chunk.sequence, control=mesh_pb2.Control(probe_reply=reply)))
        elif control.HasField("abort_heard"):
            self.turns.hear(source, chunk.group)
        elif control.HasField("group_ended") and control.group_ended.of_channel:
            self._unknown.take(chunk.group)  # nobody will ask for it
        elif chunk.sequence >= position and chunk.group not in self._over:
            self._unknown.keep(chunk.group, source, chunk)
        else:
            self.telemetry.count_stale()
            if not control.HasField("abort"):
                self.turns.answer(source, chunk.group, chunk.sequence)

    def _acknowledge_abort(self, source: int, channel: int) -> None:
        """Tell another rank, on which a send or a receive has failed, that this one has heard of the failure; see [Note: turns]."""
        self.post(source, Chunk(self.mesh.epoch, channel, 0, control=mesh_pb2.Control(abort_heard=mesh_pb2.AbortHeard())))

    def _hear_loss(self, source: int, loss: mesh_pb2.Loss) -> None:
        self._causes.setdefault(source, loss.rank)
        if loss.last_words and loss.rank in self.mesh.peers:
            self._last_words.setdefault(loss.rank, printable(loss.last_words))

    def on_lost(self, rank: int, reason: str, *, told: bool = False) -> None:
        if rank not in self.lost and not self._closed:
            if told:
                self._last_words[rank] = reason
            reason = self._last_words.get(rank, reason)
            self._tell(rank)
            if self.cause(rank) not in map(self.cause, self.lost):  # ranks that leave because of one loss count as that loss
                self.telemetry.losses += 1
            self.lost[rank] = reason
            for group in list(self._groups.values()):
                group.lose(rank, reason)
            for tell in list(self.at_loss):
                tell(rank)
            self.wake_receivers()

    def _tell(self, rank: int) -> None:
        cause = self.cause(rank)
        loss = mesh_pb2.Control(loss=mesh_pb2.Loss(rank=cause, last_words=self.last_words(cause)))
        for peer in self.mesh.peers:
            if peer != rank:
                self.post(peer, Chunk(self.mesh.epoch, WORLD, 0, control=loss))

    def cause(self, rank: int) -> int:
        """The rank to blame for the loss of `rank`: `rank` itself, or the one that it had lost before."""
        cause = self._causes.get(rank, rank)
        return cause if cause in self.mesh.peers else rank

    def last_words(self, rank: int) -> str:
        """Why a lost rank has ended, as it told this rank or another one; empty if it did not."""
        return self._last_words.get(rank, "")

    def goodbye(self) -> mesh_pb2.Goodbye:
        """How far this rank has come in every group. Channels retired long ago are left out: they have ended for its peers, too."""
        retired = islice(reversed(self._retired.items()), _RETIRED_TOLD)
        positions = [*retired, *((group.id, group.position) for group in self._groups.values()), *self.turns.untold()]
        return mesh_pb2.Goodbye(positions=[mesh_pb2.Goodbye.Position(group=group, next_sequence=next_) for group, next_ in positions])

    def _on_goodbye(self, source: int, goodbye: mesh_pb2.Goodbye) -> None:
        positions = self._goodbyes[source] = {position.group: position.next_sequence for position in goodbye.positions}
        self.lost.setdefault(source, "it left the cluster")
        for group in list(self._groups.values()):
            group.leave(source, positions.get(group.id, 0))
        self.wake_receivers()

    def has_taken_leave(self, rank: int) -> bool:
        """Whether a rank has said goodbye; its connection may have been lost after that."""
        return rank in self._goodbyes

    def took_leave_at(self, rank: int, group: int) -> int:
        """The first collective of a group that a rank had not entered when it said goodbye; 0 if it has not. Earlier rounds can still end
        here although the rank is gone: its letters are there."""
        return self._goodbyes.get(rank, {}).get(group, 0)

    # --- the end

    def where(self) -> str:
        """The prefix of every error and log line."""
        return f"[rank {self.mesh.rank}/{self.mesh.world_size} epoch {self.mesh.epoch} step {self.telemetry.step}]"

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be begun any more. Every thread sees an `abort` at once; the loop thread may get to it late."""
        return self._closed

    @property
    def is_impaired(self) -> bool:
        """Whether a collective that is begun now might be unable to end well."""
        return self._closed or bool(self.lost)

    def check_ours(self) -> None:
        """Raise in a forked child."""
        if self.is_inherited:
            raise InheritedError(self.where())

    def check_open(self) -> None:
        self.check_ours()
        if self._closed:
            raise ClosedError(f"{self.where()} the backend is closed")

    def closed_error(self, name: str) -> ClosedError:
        return ClosedError(f"{self.where()} the backend was closed during {name}")

    async def aclose(self) -> None:
        """Let what is under way end, then tell the peers and close the mesh; after `abort`, wait until that is done. A receive that no peer
        has announced is not waited for: perhaps no peer will send."""
        async with self._closing:
            while under_way := [*self._tasks - self._receives(), *map(self._ended, self._rounds_under_way())]:
                await asyncio.wait(under_way)
            self._closed = True
            for group in self._groups.values():  # what another thread has begun meanwhile
                group.fail_all(ClosedError(f"{self.where()} the backend is closed"))
            self.wake_receivers()
            await self.mesh.aclose()
            if ends := self._free(aborted=False):
                await asyncio.wait(ends, timeout=_END_S)

    def _rounds_under_way(self) -> list[Round]:
        """All rounds under way, without those that have ended but that a second Ctrl-C kept from being forgotten."""
        return [each for group in self._groups.values() for each in group.rounds.under_way if not each.has_ended]

    def _receives(self) -> "set[asyncio.Task[Any]]":
        """The tasks of receives for which no peer has announced a send."""
        incoming = (channel for group in self.groups for channel in group.channels.incoming)
        return {task for each in self.receivers for task in each.choosing} | {task for channel in incoming for task in channel.unanswered}

    def _ended(self, begun: Round) -> "asyncio.Future[None]":
        ended = self.loop.loop.create_future()
        begun.add_done_callback(lambda _: self.loop.call(ended.set_result, None))
        return ended

    def abort(self, why: str = "") -> None:
        """Fail what is under way and close the mesh at once; the others are told why. Any thread."""
        if not self._closed:
            self._closed = True
            self.loop.call(self._fail_all)  # first; otherwise what is under way would take the closed mesh for a lost peer
            self.mesh.abort(why)

    def _fail_all(self) -> None:
        for group in self._groups.values():
            group.fail_all(ClosedError(f"{self.where()} the backend was aborted"))
        self.wake_receivers()
        self._free(aborted=True)

    def _free(self, *, aborted: bool) -> "list[asyncio.Future[None]]":
        self.watch.close()
        if self._attendant is not None:
            self._attendant.close()
        for commons in self._commons.values():
            commons.close()
        return [ending for end in list(self.at_end) for ending in end(aborted)]


def _disown_all() -> None:
    """See [Note: forked children]."""
    for board in list(_boards):
        board.is_inherited = board._closed = True


os.register_at_fork(after_in_child=_disown_all)


def _mutual(node: tuple[int, ...], rows: list[list[bool]]) -> frozenset[tuple[int, int]]:
    """The pairs of ranks that have each other in their rows."""
    does = {(one, other) for one, row in zip(node, rows, strict=True) for other, has in zip(node, row, strict=True) if has}
    return frozenset(pair for pair in does if pair[::-1] in does)


def group_id(members: tuple[int, ...], purpose: str, again: int) -> int:
    """A 64-bit id, the same on all members and different for different groups; never WORLD."""
    digest = hashlib.blake2b(repr((members, purpose, again)).encode(), digest_size=8).digest()
    value = int.from_bytes(digest)
    if value == WORLD:
        raise ProtocolError("a group id collides with the world's")  # one chance in 2^64
    return value
