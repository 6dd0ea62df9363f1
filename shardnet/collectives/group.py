"""A group of ranks on a mesh: sorts what arrives for its collectives, and gives one verdict when one fails.

[Note: the end of a group] A rank that ends a group tells the others, and says how far it has come: collectives that it has done may still
end well on the others, and later ones cannot. Each of the others then tells all members the same about itself, because a collective that
goes on among the remaining ranks ends only if all of them have begun it. Sends and receives are groups of two: a rank that ends a group
ends those first.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING

from shardnet.collectives import verdict
from shardnet.collectives.any_source import Ending
from shardnet.collectives.channels import Channels
from shardnet.collectives.commons import Commons
from shardnet.collectives.farewell import Farewell
from shardnet.collectives.first_contact import FirstContact
from shardnet.collectives.ledger import Ledger
from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.letters.round import Round
from shardnet.collectives.letters.rounds import Rounds
from shardnet.collectives.operation import Operation
from shardnet.collectives.operations import Operations
from shardnet.collectives.roll_call import RollCall
from shardnet.collectives.route import Route
from shardnet.errors import ClosedError, CollectiveError, CollectiveMismatch, CollectiveTimeout, PeerLost, ProtocolError, ShardnetError
from shardnet.flight import Party
from shardnet.pb import mesh_pb2
from shardnet.telemetry import Telemetry
from shardnet.transport.shared_memory import Loan
from shardnet.wire import Chunk

if TYPE_CHECKING:
    from shardnet.collectives.switchboard import Switchboard


class Group:
    """One group of ranks, as one of its ranks sees it; lives as long as its mesh, or until it is retired."""

    def __init__(
        self,
        board: "Switchboard",
        group_id: int,
        members: tuple[int, ...],
        telemetry: Telemetry | None = None,
        *,
        channel: str = "",
        first: int = 0,
        known: bool = True,
    ) -> None:
        """`channel` is its title if the group is a channel, and `first` is the number of its first collective. If the group is not `known`
        to all members, they tell each other that they have made it; see [Note: first contact] in first_contact.py."""
        self.board = board
        self.telemetry = telemetry or board.telemetry
        self.id = group_id
        self.members = members  # global ranks, ascending
        self.rank = members.index(board.mesh.rank)
        self.size = len(members)
        self.party = Party(board.mesh.epoch, group_id, members, channel)
        self._local = {member: index for index, member in enumerate(members)}
        nodes = (tuple(self._local[rank] for rank in node if rank in self._local) for node in board.nodes)
        self.nodes = tuple(node for node in nodes if node)  # ranks of the group
        self.route = Route.of(board.routing.cut(self.nodes), self.rank)
        self._ledger = Ledger(self.party, self.telemetry, board.limits, first)
        self.operations = Operations(self, self._ledger)
        self.rounds = Rounds(self, self._ledger)
        self._borrowers = frozenset[int](), frozenset[int]()  # the mesh's global ranks, and the group's ranks among them
        # called with the number of a collective that has failed elsewhere after it had ended well here; loop thread
        self.at_failure_elsewhere: list[Callable[[int], object]] = []
        self.roll_call = RollCall(self)
        self.channels = Channels(self)
        self._ended: Ending | None = None  # why nothing is begun any more, if the group itself has ended and not the mesh
        self._outlasting = frozenset[int]()  # collectives that may still end well after that; see [Note: the end of a group]
        # the first collective that has failed because this rank ended the group or the mesh; no abort tells the others of such a failure
        self._undone = math.inf
        self.first_contact = FirstContact(self, needed=not known)
        self.farewell = Farewell(self)

    @property
    def epoch(self) -> int:
        return self.board.mesh.epoch

    @property
    def peers(self) -> list[int]:
        """The other ranks of the group, beginning after this one, so that not all ranks send to the same one first."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    @property
    def commons(self) -> Commons:
        """The memory that the group's ranks on this node share."""
        return self.board.commons(frozenset(self.members[rank] for rank in self.route.node))

    @cached_property
    def mail(self) -> Mail | None:
        """The group's access to the mailboxes of all members, if every member can read every other's; all ranks get the same answer."""
        return self.board.mail(self)

    @property
    def is_closed(self) -> bool:
        """Whether no collective can be begun any more. Any thread."""
        return self._ended is not None or self.board.is_closed

    @property
    def is_idle(self) -> bool:
        """Whether it is open, nothing is under way, and nothing has come for a collective not yet entered. Loop thread."""
        return self._ended is None and self.is_at_rest and self._ledger.is_settled

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way. Loop thread."""
        return not (self.under_way or self.operations.are_queued)

    def may_go_on(self, sequence: int) -> bool:
        """Whether a collective that has been called may still end well. Any thread."""
        return not self.is_closed or sequence in self._outlasting

    def check_open(self) -> None:
        """Raise if this group or the mesh has ended. Any thread."""
        if self._ended is not None:
            raise self._ended()
        self.board.check_open()

    def announced_since(self) -> int | None:
        """When something first came for the next collective, which this rank has not begun, by time.monotonic_ns; None: nothing has."""
        return self._ledger.announced_since()

    # --- who may go on (loop thread)

    def check(self, operation: Operation | Round) -> None:
        """Raise if the operation cannot end well, or was failed before it began."""
        if operation.error is not None:
            raise operation.error
        if self._ended is not None and operation.sequence not in self._outlasting:
            raise self._ended()
        self.board.check_open()
        for lost, reason in self.board.lost.items():
            if lost in self._local and not (isinstance(operation, Round) and operation.sequence < self.board.took_leave_at(lost, self.id)):
                raise verdict.peer_lost(self.board, lost, operation.name, reason)

    # --- traffic (loop thread)

    async def send(self, operation: Operation, peers: Sequence[int], chunk: Chunk) -> None:
        """Send a chunk of an operation to one or more peers. Raises PeerLost naming the collective."""
        targets = [self.members[peer] for peer in peers]
        if chunk.size:
            near = [rank for rank in targets if chunk.lent is not None or self.board.mesh.carries(rank, chunk)]
            self.telemetry.count_sent(chunk.size, near=near, far=[rank for rank in targets if rank not in near] if near else targets)
        try:
            await self.board.send_all(targets, chunk)
        except PeerLost as error:
            raise self._named(error, operation) from error

    def tell(self, peer: int, sequence: int, control: mesh_pb2.Control, data: bytes = b"") -> None:
        """Send a peer a control message about a collective, without waiting for it. The message is dropped if the peer is gone."""
        self.board.post(self.members[peer], Chunk(self.epoch, self.id, sequence, data=data, control=control))

    @property
    def borrowers(self) -> frozenset[int]:
        """The members that can read data directly from this rank's memory."""
        ranks = self.board.mesh.borrowers
        if self._borrowers[0] is not ranks:
            self._borrowers = ranks, frozenset(self._local[rank] for rank in ranks if rank in self._local)
        return self._borrowers[1]

    def lend(self, operation: Operation, peer: int, chunk: Chunk, loan: Loan) -> None:
        """Tell a borrower where a chunk's data lies. Raises PeerLost naming the collective."""
        self.telemetry.count_sent(len(chunk.data), near=(self.members[peer],))
        try:
            self.board.lend(self.members[peer], chunk, loan)
        except PeerLost as error:
            raise self._named(error, operation) from error

    def _named(self, error: PeerLost, operation: Operation) -> PeerLost:
        """The same error with the collective's name: the mesh knows which rank is lost, but not what this rank was doing."""
        return verdict.peer_lost(self.board, error.rank, operation.name, self.board.lost.get(error.rank, str(error)))

    def on_chunk(self, source_global: int, chunk: Chunk) -> None:
        """Hand a chunk to its operation, keep it if that is not entered yet, or drop it if that has ended."""
        source = self._local.get(source_global)
        if source is None:
            raise ProtocolError(f"rank {source_global} is no member of group {self.id:#x}")
        if chunk.size:
            self.telemetry.count_received(source_global, chunk.size, near=chunk.came_through_memory)
        if chunk.control is not None and chunk.control.HasField("group_ended"):
            self._hear_end(chunk.control.group_ended)
        elif chunk.control is not None and chunk.control.HasField("group_over"):
            self.farewell.hear(source)
        elif chunk.control is not None and chunk.control.HasField("group_made"):
            self.first_contact.hear(source)
        elif chunk.control is not None and chunk.control.HasField("abort_heard"):
            self.board.turns.hear(source_global, self.id)
        elif chunk.control is not None and chunk.control.HasField("probe"):
            self._answer_probe(source, chunk, chunk.control.probe)
        elif chunk.control is not None and chunk.control.HasField("probe_reply"):
            self.roll_call.hear(source, chunk.control.probe_reply)
        elif not self.operations.on_chunk(source, chunk):
            self._on_other(source, chunk)

    def _on_other(self, source: int, chunk: Chunk) -> None:
        """Take a chunk of a collective that is not among the operations under way."""
        with self._ledger.lock:
            begun = self.rounds.find(chunk.sequence)
            if begun is None and self._ended is None and not self._ledger.has_entered(chunk.sequence):
                self._ledger.early.keep(chunk.sequence, source, chunk)
                self.board.wake_receivers()
                return
        if begun is not None:
            self.rounds.hear(begun, source, chunk)
            return
        if self.mail is None or chunk.size or chunk.control is None or not chunk.control.HasField("announcement"):
            self.board.telemetry.count_stale()  # except an announcement of a round, which is often out of date when it arrives
        if chunk.control is not None and chunk.control.HasField("abort"):
            self._take_back(chunk.sequence)
        elif self.party.channel:
            self.board.turns.answer(self.members[source], self.id, chunk.sequence)

    def _take_back(self, sequence: int) -> None:
        """Handle the news that a collective which has ended well here has failed on another rank."""
        if self.mail is not None:
            self.mail.take_back(sequence)
        for tell in list(self.at_failure_elsewhere):
            tell(sequence)

    def deliver(self, operation: Operation, source: int, chunk: Chunk) -> None:
        """Hand a chunk to an operation that takes chunks, or end it."""
        if chunk.control is not None and chunk.control.HasField("abort"):
            operation.fail(self._verdict(operation, source, chunk.control.abort))
            return
        try:
            operation.on_chunk(source, chunk)
        except ProtocolError as error:
            self.fail(operation, error)

    def hear_abort(self, begun: Round, source: int, abort: mesh_pb2.Abort) -> None:
        """Handle another rank's word that a round has failed."""
        if not begun.fail(self._verdict(begun, source, abort)):
            self._take_back(begun.sequence)

    def _verdict(self, operation: Operation | Round, source: int, abort: mesh_pb2.Abort) -> ShardnetError:
        return verdict.unpack(abort, f"{self.board.where()} {operation.name} was aborted by rank {self.members[source]}")

    # --- failure (loop thread)

    @property
    def under_way(self) -> list[Operation | Round]:
        return [*self.operations.under_way, *self.rounds.under_way]

    @property
    def unanswered(self) -> "list[asyncio.Task[None]]":
        """The tasks of the operations under way that no peer has announced yet."""
        return [each.task for each in self.operations.under_way if each.task is not None and self._is_unanswered(each)]

    def _is_unanswered(self, operation: Operation) -> bool:
        return not operation.is_announced and operation.sequence not in self._ledger.early

    def lose(self, global_rank: int, reason: str) -> None:
        """A member is gone: fail whatever is under way, which cannot end any more."""
        if global_rank in self._local:
            for operation in self.under_way:
                self.fail(operation, verdict.peer_lost(self.board, global_rank, operation.name, reason))

    def leave(self, global_rank: int, next_sequence: int) -> None:
        """A member said goodbye before it entered collective `next_sequence`: fail that one and later ones, which cannot end."""
        if global_rank in self._local:
            for operation in self.under_way:
                if operation.sequence >= next_sequence:
                    reason = "it left the cluster without entering this collective"
                    operation.fail(verdict.peer_lost(self.board, global_rank, operation.name, reason))

    def fail_all(self, error: ShardnetError, *, but: Collection[int] = ()) -> None:
        for operation in self.under_way:
            if operation.sequence not in but and operation.fail(error):
                self._leave_undone(operation)
        self.operations.fail_queued(error)

    def _leave_undone(self, operation: Operation | Round) -> None:
        """Count a failed collective as not done: the others learn of its failure from how far this rank says that it has come."""
        self._undone = min(self._undone, operation.sequence)

    def refuse(self, begun: Round) -> None:
        """Fail a round that was called after the group, or the mesh, had ended."""
        try:
            self.check_open()
        except ShardnetError as error:
            self.fail(begun, error)

    def disband(self, why: str) -> None:
        """End only this group, with everything under way in it, here and on its other ranks. Any thread."""
        detail = f"{self.board.where()} {why}"
        self.end(partial(ClosedError, detail), mesh_pb2.GroupEnded(rank=self.board.mesh.rank, detail=detail))

    def end(self, error: Ending, ended: mesh_pb2.GroupEnded) -> None:
        """Begin nothing any more, and fail what is under way, except collectives that the rank which ended the group has done; tell the
        others. Any thread. See [Note: the end of a group]."""
        if self._ended is None:
            self._ended = error
            self.mail = None  # a round would not ask whether the group has ended
            self.channels.end(error, ended)
            self.board.loop.call(self._end, error, ended)

    def _end(self, error: Ending, ended: mesh_pb2.GroupEnded) -> None:
        position = min([self.position, *(each.sequence for each in self.under_way if each.sequence not in self._outlasting)])
        self.fail_all(error(), but=self._outlasting)
        of_channel = bool(self.party.channel)
        word = mesh_pb2.GroupEnded(rank=ended.rank, detail=ended.detail, next_sequence=position, of_channel=of_channel)
        for peer in self.peers:
            self.tell(peer, 0, mesh_pb2.Control(group_ended=word))
        self.farewell.leave()

    def _hear_end(self, ended: mesh_pb2.GroupEnded) -> None:
        by_whom = f"was aborted by rank {ended.rank}: {ended.detail}"
        under_way = {operation.sequence: operation for operation in self.under_way}
        for sequence, operation in under_way.items():
            # A collective that was begun after this group had ended here fails by itself, with that reason.
            if sequence >= ended.next_sequence and (self._ended is None or sequence in self._outlasting):
                operation.fail(CollectiveError(f"{self.board.where()} {operation.name} {by_whom}"))
        if self._ended is None:
            self._outlasting = frozenset(sequence for sequence in under_way if sequence < ended.next_sequence)
        self.end(partial(CollectiveError, f"{self.board.where()} {self.party.title} {by_whom}"), ended)

    def release(self) -> None:
        """Note that this rank cannot begin anything in it any more. Any thread. See [Note: left groups] in farewell.py."""
        self.board.loop.call(self.farewell.leave)

    @property
    def position(self) -> int:
        """The number of the first collective that this rank has not done and is not in. Any thread."""
        return int(min(self._ledger.position, self._undone))

    def mismatch(self, operation: Operation | Round, peer: int, theirs: str) -> None:
        """This rank and a peer disagree about which collective it is: end it for everyone."""
        detail = (
            f"rank {self.members[self.rank]} is in {operation.call.signature} but rank {self.members[peer]} is in {theirs} "
            f"(collective #{operation.sequence} of {self.party.title}); call the same collectives in the same order on all ranks"
        )
        self.fail(operation, CollectiveMismatch(f"{self.board.where()} {detail}"))

    def fail(self, operation: Operation | Round, error: BaseException) -> None:
        """End an operation on every rank. If it has already ended here, the others know."""
        if not operation.fail(error):
            return
        if isinstance(error, ClosedError):  # then the others hear of the end of this rank, or of the group
            self._leave_undone(operation)
            return
        word = mesh_pb2.Control(abort=verdict.pack(error))
        if isinstance(operation, Operation) and operation.awaits_turn and self._is_unanswered(operation):
            self.board.turns.fail(operation, word)
            return
        if self.party.channel and isinstance(operation, Operation):
            self.board.turns.keep(operation)
        for peer in self.peers:
            self.tell(peer, operation.sequence, word)

    # --- diagnosis (loop thread)

    def time_out(self, late: Round) -> None:
        """The time of a round is over: fail it with the ranks that are missing."""

        async def end() -> None:
            self.fail(late, await self.diagnose(late))

        self.board.spawn(end())

    async def diagnose(self, operation: Operation | Round) -> CollectiveTimeout:
        """Ask every member whether it has entered the collective, and name those that have not."""
        attendance = await self.roll_call.hold(operation.sequence)
        detail = f"{self.board.where()} {operation.name} of {self.party.title} did not end within {operation.call.timeout_s:g} s: "
        if attendance.absent:
            detail += f"missing {'; '.join(map(str, attendance.absent))}"
        else:
            slow = " and ".join(f"rank {each.rank} ({each.address})" for each in attendance.busy)
            who = f"data still moves to or from {slow}" if slow else "all ranks have entered it"
            detail += f"{who}, so the network or a rank is too slow; to allow more time, set Timeouts(collective_s=...)"
        return CollectiveTimeout(detail, [each.rank for each in attendance.absent])

    def _answer_probe(self, source: int, chunk: Chunk, probe: mesh_pb2.Probe) -> None:
        reply = self._ledger.answer(probe, chunk.sequence, self.board.waits_in(but=self.id))
        self.tell(source, chunk.sequence, mesh_pb2.Control(probe_reply=reply))
