"""`Mesh`: ordered, bounded pipes from one rank to every other, for one membership epoch."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory import Loan, Mailbox, MailboxView
from shardnet.wire import Chunk


class Receiver(Protocol):
    """The object to which a mesh hands what it receives. Called on the loop thread; must not block."""

    def on_chunk(self, source: int, chunk: Chunk) -> None:
        """A chunk arrived from rank `source`. Chunks of one source come in the order in which they were sent."""

    def on_lost(self, rank: int, reason: str, *, told: bool = False) -> None:
        """The rank's pipe broke without a goodbye. `told`: the reason is what the rank itself said last. Called at most once per rank."""

    def goodbye(self) -> mesh_pb2.Goodbye:
        """What to tell the peers when this rank closes."""


class Mesh(ABC):
    """One rank's pipes to its peers. All methods except `abort` run on the loop thread.

    The buffers that the caller passes in bound the memory: `send` returns when the chunk's buffer is free again, and the mesh
    hands each chunk that arrives to the receiver at once, which copies or reduces it where it belongs.
    """

    def __init__(self, rank: int, world_size: int, epoch: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.epoch = epoch

    @property
    def peers(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.world_size) if rank != self.rank)

    @property
    def memory_peers(self) -> frozenset[int]:
        """The ranks to which data goes through memory that both processes map."""
        return frozenset()

    def carries(self, peer: int, chunk: Chunk) -> bool:
        """Whether a chunk's data goes to a peer through shared memory."""
        return False

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of a node may share memory: the same answer on all ranks. `memory_peers` says which ones do."""
        return False

    @property
    def borrowers(self) -> frozenset[int]:
        """The ranks that can read data directly from this rank's own memory: see `lend`."""
        return frozenset()

    @property
    def mailbox(self) -> Mailbox | None:
        """Where this rank leaves letters for others of its node."""
        return None

    @property
    def mailboxes(self) -> Mapping[int, MailboxView]:
        """The mailboxes of other ranks of its node that this rank can read."""
        return {}

    @abstractmethod
    async def start(self, receiver: Receiver) -> None:
        """Open the pipes. Raises PeerLost, naming the missing ranks, if not all pipes are open in time."""

    @abstractmethod
    async def send(self, peer: int, chunk: Chunk) -> None:
        """Send; returns when the chunk's buffer may be used again. Raises PeerLost if the pipe is broken."""

    async def send_all(self, peers: Sequence[int], chunk: Chunk) -> None:
        """Send the same chunk to several peers, as `send` does."""
        for peer in peers:
            await self.send(peer, chunk)

    def process(self, peer: int) -> int | None:
        """The process id of a peer that runs on this machine and shares its memory with this rank."""
        return None

    def lend(self, peer: int, chunk: Chunk, loan: Loan) -> None:
        """Tell a peer, one of `borrowers`, where a chunk's data lies, without waiting. Raises PeerLost if the pipe is broken.

        The data must stay as it is until the peer has read it, or the loan is revoked. See [Note: loans].
        """
        raise NotImplementedError(f"{type(self).__name__} cannot lend data, because it has no borrowers")

    def is_silent(self, rank: int) -> bool:
        """Whether a rank has not answered for a while, but is not lost yet."""
        return False

    def moved_bytes(self, rank: int) -> int:
        """A counter that grows with all bytes that come from a rank, and with those sent to it that its system has received."""
        return 0

    @abstractmethod
    def address(self, rank: int) -> str:
        """Where a rank is, for messages."""

    @abstractmethod
    async def aclose(self) -> None:
        """Say goodbye, wait a little for the peers' own, close."""

    @abstractmethod
    def abort(self, why: str = "") -> None:
        """Close at once, without a goodbye: the peers see this rank as lost, and learn why if it says so. Safe from any thread."""
