"""`Sharing`: which ranks of its node a rank shares memory with, and the data that goes through it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress

from shardnet.config import Limits
from shardnet.errors import PeerLost, ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory.lending import Borrowed, Loan, can_read
from shardnet.transport.shared_memory.mailbox import Mailbox, MailboxView
from shardnet.transport.shared_memory.view import View
from shardnet.transport.shared_memory.window import Piece, Window
from shardnet.wire import Chunk

log = logging.getLogger(__name__)

Put = Callable[[int, Chunk], Awaitable[None]]  # a chunk onto the stream to a peer; raises PeerLost
PutNow = Callable[[int, Chunk], None]  # the same without waiting for room


class Sharing:
    """One rank's window, and its views of the windows of `neighbours`, the other ranks of its node. Runs on the loop thread."""

    def __init__(
        self,
        where: str,
        epoch: int,
        place: int,
        neighbours: Sequence[int],
        limits: Limits,
        put: Put,
        put_now: PutNow,
        *,
        lending: bool = True,
    ) -> None:
        """place    this rank's number among the ranks of its node
        lending  whether ranks may read data directly from each other's memory, this rank from others and others from it
        """
        self._where = where
        self._epoch = epoch
        self._place = place
        self._limits = limits
        self._put = put
        self._put_now = put_now
        self._lending = lending
        self._window: Window | None = None
        self._turn = asyncio.Lock()  # first come, first served
        self._views: dict[int, View] = {}
        self._readers: set[int] = set()  # ranks that see this rank's window
        self.borrowers = frozenset[int]()  # the readers that can also read what this rank lends
        self.mailbox: Mailbox | None = None  # this rank's own
        self.mailboxes: dict[int, MailboxView] = {}  # the neighbours' mailboxes that this rank sees
        self._processes: dict[int, int] = {}  # the process ids of ranks whose window this rank sees, by rank
        self._lenders: set[int] = set()  # of those, the ranks whose memory this rank can read
        self._neighbours = frozenset(neighbours)
        self._asked = set(neighbours)  # ranks that have not answered yet
        self._refusals: dict[int, str] = {}
        self._settled = asyncio.Event()

    @property
    def readers(self) -> frozenset[int]:
        """The ranks that see this rank's window."""
        return frozenset(self._readers)

    def process(self, peer: int) -> int | None:
        """The process id of a rank that this one shares memory with."""
        return self._processes.get(peer)

    async def open(self, timeout_s: float) -> None:
        """Offer the window to all neighbours, once their streams are open, and wait for their answers."""
        if not self._asked:
            return
        try:
            self._window = Window(self._limits.window_bytes, self._ask_for_room)
        except OSError as error:
            log.warning("%s no shared memory (%s): data for the ranks of this node goes over gRPC", self._where, error)
            return
        offer = self._window.offer()
        if self._limits.letter_bytes:
            try:
                self.mailbox = Mailbox(self._place, self._limits.mailbox_bytes)
                offer.mailbox.CopyFrom(self.mailbox.offer())
            except OSError as error:
                log.warning(
                    "%s no mailbox (%s): collectives inside this node are announced over gRPC, which takes longer", self._where, error
                )
        for peer in self._asked:
            self._post(peer, mesh_pb2.Control(window_offer=offer))
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
        except TimeoutError:
            self._refusals.update(dict.fromkeys(self._asked, f"no answer within {timeout_s:g} s"))
            self._asked.clear()
        self._window.hide()
        if self.mailbox is not None:
            self.mailbox.hide()
        if self._refusals:
            why = "; ".join(f"rank {peer}: {reason}" for peer, reason in sorted(self._refusals.items()))
            log.warning("%s data for some ranks of this node goes over gRPC, not through shared memory: %s", self._where, why)

    def carries(self, peer: int, chunk: Chunk) -> bool:
        """Whether a chunk goes to a peer through memory."""
        return peer in self._readers and len(chunk.data) >= max(self._limits.inline_bytes, 1)

    async def send(self, peers: Sequence[int], chunk: Chunk) -> None:
        """Send a chunk to peers for which `carries` is true; its buffer is free when this returns. Raises PeerLost."""
        assert self._window is not None
        async with self._turn:
            piece = await self._window.put(chunk.data, peers)
            if piece is not None:
                self._tell(peers, chunk, piece)
                return
        for peer in peers:
            await self._put(peer, chunk)

    def lend(self, peer: int, chunk: Chunk, loan: Loan) -> None:
        """Tell a borrower where a chunk's data lies; see `Mesh.lend`."""
        control = mesh_pb2.Control(loan=loan.of(chunk.data))
        if chunk.control is not None:
            control.MergeFrom(chunk.control)
        self._put_now(peer, chunk.saying(control))

    def receive(self, peer: int, chunk: Chunk, deliver: Callable[[Chunk], None]) -> None:
        """Take a chunk that is about windows or loans; `deliver` gets the chunk with the data that it refers to. Raises ProtocolError."""
        assert chunk.control is not None
        if chunk.control.HasField("window_piece"):
            self._on_piece(peer, chunk, chunk.control.window_piece, deliver)
            return
        if chunk.control.HasField("loan"):
            self._on_loan(peer, chunk, chunk.control.loan, deliver)
            return
        match chunk.control.WhichOneof("kind"):
            case "window_released":
                if self._window is not None:
                    self._window.release(peer, chunk.control.window_released.position)
            case "window_full":
                if (view := self._views.get(peer)) is not None and view.owes_report:
                    self._post(peer, mesh_pb2.Control(window_released=view.report()))
            case "window_offer":
                self._on_offer(peer, chunk.control.window_offer)
            case "window_answer":
                self._on_answer(peer, chunk.control.window_answer)

    def leave(self, peer: int) -> None:
        """The peer has said goodbye: it no longer takes part in anything."""
        self._forget(peer)
        if self._window is not None:
            self._window.leave(peer)
        self._settle(peer)

    def lose(self, peer: int) -> None:
        """The peer is lost, dead or not."""
        self._forget(peer)
        if self._window is not None:
            self._window.lose(peer)
        self._settle(peer)

    def _forget(self, peer: int) -> None:
        if peer in self.mailboxes:
            self.mailboxes[peer].gone = True
        self._readers.discard(peer)
        self.borrowers -= {peer}

    def close(self) -> None:
        """Give the memory back. Chunks that are sent after this go nowhere."""
        self._readers.clear()
        self.borrowers = frozenset()
        if self._window is not None:
            self._window.close()
        if self.mailbox is not None:
            self.mailbox.hide()
        for view in self._views.values():
            view.close()
        self._views.clear()

    def _tell(self, peers: Sequence[int], chunk: Chunk, piece: Piece) -> None:
        """Tell peers where a chunk's data lies. This must not wait: readers release up to a position, so they must hear of pieces in the
        order in which these lie, and a frozen reader would hold up the others. The window's size bounds what queues up for a reader."""
        assert self._window is not None
        control = mesh_pb2.Control(window_piece=mesh_pb2.WindowPiece(position=piece.start, size=len(chunk.data)))
        if chunk.control is not None:
            control.MergeFrom(chunk.control)
        place = chunk.saying(control)
        untold = list(peers)
        try:
            while untold:
                self._put_now(untold[0], place)
                del untold[0]
        finally:
            self._window.withdraw(piece, untold)

    def _post(self, peer: int, control: mesh_pb2.Control) -> None:
        """Send a message about windows; a peer that is gone need not get it."""
        with suppress(PeerLost):
            self._put_now(peer, Chunk(self._epoch, 0, 0, control=control))

    def _on_piece(self, peer: int, chunk: Chunk, piece: mesh_pb2.WindowPiece, deliver: Callable[[Chunk], None]) -> None:
        if (view := self._views.get(peer)) is None:
            raise ProtocolError(f"rank {peer} sent data through a window that this rank does not see")
        chunk.data, chunk.frame = view.read(piece), None
        deliver(chunk)
        if view.take(piece):
            self._post(peer, mesh_pb2.Control(window_released=view.report()))

    def _on_loan(self, peer: int, chunk: Chunk, loan: mesh_pb2.Loan, deliver: Callable[[Chunk], None]) -> None:
        if peer not in self._lenders:
            raise ProtocolError(f"rank {peer} lent data to this rank, which cannot read its memory")
        chunk.lent, chunk.frame = Borrowed.of(self._processes[peer], loan), None
        deliver(chunk)

    def _on_offer(self, peer: int, offer: mesh_pb2.WindowOffer) -> None:
        if peer not in self._neighbours or peer in self._views:
            raise ProtocolError(f"rank {peer} offered a window, but is not on this node or has offered one before")
        refusal = ""
        try:
            self._views[peer] = View(offer)
        except (OSError, ValueError) as error:  # mmap raises ValueError for sizes that make no sense
            refusal = str(error)
        borrows = not refusal and self._lending and can_read(offer)
        if not refusal:
            self._processes[peer] = offer.pid
            with suppress(OSError):
                self.mailboxes[peer] = MailboxView(offer.pid, offer.mailbox)
        if borrows:
            self._lenders.add(peer)
        self._post(peer, mesh_pb2.Control(window_answer=mesh_pb2.WindowAnswer(refusal=refusal, borrows=borrows)))

    def _on_answer(self, peer: int, answer: mesh_pb2.WindowAnswer) -> None:
        if self._window is None:
            raise ProtocolError(f"rank {peer} answered the offer of a window, but this rank has offered none")
        if peer in self._asked:
            if answer.refusal:
                self._refusals[peer] = answer.refusal
            else:
                self._readers.add(peer)
                if answer.borrows and self._lending:
                    self.borrowers |= {peer}
        self._settle(peer)

    def _settle(self, peer: int) -> None:
        self._asked.discard(peer)
        if not self._asked:
            self._settled.set()

    def _ask_for_room(self, holders: Collection[int]) -> None:
        for peer in holders:
            self._post(peer, mesh_pb2.Control(window_full=mesh_pb2.WindowFull()))
