"""`Backend`: what the sharded training above needs from the communication below."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from shardnet.backend.arguments import as_output, joined
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.backend.pending import Pending
from shardnet.backend.streams import Event
from shardnet.collectives.reduction import ReduceOp
from shardnet.errors import UsageError
from shardnet.uncompiled import uncompiled

if TYPE_CHECKING:
    from shardnet.telemetry import Telemetry

Tensor = torch.Tensor


@uncompiled
class Backend(ABC):
    """One rank's end of a group of ranks.

    Every collective returns at once with a `Pending`; all ranks of the group must call the same collectives in the
    same order. Wrong arguments raise a `UsageError` from the call itself, before any traffic. The handle raises all other errors: a
    `CollectiveError`, `ProtocolError` or `ClosedError`; for a `send` and `recv` of different sizes a `SizeMismatchError` on both ranks.
    (`ClosedError` may come from the call, too.)

    Inputs may be read but not written until the handle is done. `out`, if given, belongs to the collective until then; it may overlap
    the input. It is contiguous and has the input's dtype and as many elements as the result, in any shape. Cancelling an `await` cancels
    the waiting, not the collective. `timeout_s` counts from the call and ends in a `CollectiveTimeout`; None means the backend's default.
    `label` names the collective in errors and traces, and must be equal on all ranks.

    Tensors are of float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8 or bool. MEAN is for floats, BAND, BOR and BXOR are
    for integers and bool. Anything else is a `DtypeError`.

    Tensors are on the CPU or on a CUDA device; for one collective that must be the same on all ranks. On a GPU the calling thread's current
    stream counts: the work queued on it at the call is done before inputs are read and outputs written, but no thread waits for it.
    Results are ready in stream order, see [Note: results on a GPU].
    """

    def __init_subclass__(cls) -> None:
        uncompiled(cls)

    @property
    @abstractmethod
    def rank(self) -> int:
        """0-based rank in this group."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Number of ranks in this group."""

    @property
    @abstractmethod
    def telemetry(self) -> "Telemetry":
        """Spans and counters of this rank."""

    @property
    @abstractmethod
    def node_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of this group by node, nodes in rank order."""

    @abstractmethod
    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, out: Tensor | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        """Reduce over ranks: S → S on every rank, bit-identical. `out` may be `tensor` itself."""

    @abstractmethod
    def broadcast(
        self, tensor: Tensor, root: int, *, out: Tensor | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        """Root's `tensor` on every rank, S → S. On other ranks `tensor` gives shape and dtype; `out` may be `tensor` itself."""

    @abstractmethod
    def all_gather(
        self,
        tensor: Tensor,
        *,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        after: Event | None = None,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Pending[Tensor]:
        """Concatenate over ranks on dim 0: [d0, …] → [d0·ws, …]; 0-dim → [ws].

        `sizes` gives each rank's d0 if they differ; then the result is [sum(sizes), …]. `tensor` may be this
        rank's own slice of `out`: then it is not copied. With `after`, a `tensor` on a GPU is read as soon as that event has happened,
        which may be long before the current stream has done the work queued on it.
        """

    def all_gather_on_node(
        self, tensor: Tensor, *, sizes: Sequence[int] | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[NodeBuffer]:
        """Like `all_gather`, but into memory that all ranks of a node share, if there is such memory and it is worth it.

        Each rank writes its own part, and no rank copies those of its neighbours. Release the result: its memory cannot be used again
        before all ranks of the node have released it.
        """
        return self.all_gather(tensor, sizes=sizes, timeout_s=timeout_s, label=label).read_as(NodeBuffer)

    def broadcast_on_node(self, tensor: Tensor, root: int, *, timeout_s: float | None = None, label: str = "") -> Pending[NodeBuffer]:
        """Like `broadcast`, but into such memory: one rank of each node writes it, on root's node that is root. Release the result.

        If there is no such memory, the result may come in `tensor`, which must be contiguous and belongs to the collective until then. If
        there is, `tensor` is never touched on the other ranks, so one from `torch.empty` takes no memory.
        """
        out = as_output(tensor, tensor, None, "tensor")
        return self.broadcast(tensor, root, out=out, timeout_s=timeout_s, label=label).read_as(NodeBuffer)

    @property
    def shares_node(self) -> bool:
        """Whether `all_gather_on_node` and `broadcast_on_node` may give memory that ranks share. The same on all ranks."""
        return False

    @abstractmethod
    def reduce_scatter(
        self,
        tensor: Tensor,
        op: ReduceOp = ReduceOp.SUM,
        *,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Pending[Tensor]:
        """Reduce over ranks and keep this rank's slice of dim 0: [d0, …] → [d0/ws, …], or [sizes[rank], …].

        Raises SizeMismatchError if d0 is not the sum of `sizes` or, without `sizes`, not a multiple of the world size.
        """

    def reduce_scatter_pieces(
        self,
        pieces: Sequence[Tensor],
        op: ReduceOp = ReduceOp.SUM,
        *,
        sizes: Sequence[int] | None = None,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Pending[Tensor]:
        """Like `reduce_scatter` of the pieces, of any shapes, flattened and put end to end: [sum of their numel] → [sizes[rank]], in new
        memory. To other ranks it is the same collective, and their pieces may be of other sizes.

        With `lends_pieces` the pieces are read where they are. So they may not be written until the handle is done.
        """
        return self.reduce_scatter(joined(pieces), op, sizes=sizes, timeout_s=timeout_s, label=label)

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, *, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        """Like `all_reduce` of the pieces put end to end: [sum of their numel] on every rank."""
        return self.all_reduce(joined(pieces), op, timeout_s=timeout_s, label=label)

    @property
    def lends_pieces(self) -> bool:
        """Whether `reduce_scatter_pieces` and `all_reduce_pieces` work without concatenating large pieces."""
        return False

    @abstractmethod
    def all_to_all(
        self,
        tensor: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Pending[Tensor]:
        """Slot i of the result comes from rank i: [ws·k, …] → [ws·k, …], or [sum(send)] → [sum(recv)] along dim 0.

        Raises SizeMismatchError if d0 is not the sum of `send_sizes` or, without sizes, not a multiple of the world size.
        """

    @abstractmethod
    def send(self, tensor: Tensor, to: int, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[None]:
        """Send to one rank; done when the receiver takes it and `tensor` may be written again.

        Sends and receives of one pair and tag match in order, and only within this group: another group of the same ranks has its own.
        """

    @abstractmethod
    def recv(self, into: Tensor, source: int, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[Tensor]:
        """Receive from one rank into a contiguous tensor of the sender's number of elements and dtype; the result is `into`."""

    def recv_any(self, into: Tensor, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[int]:
        """Receive from whichever rank sends first with that tag, into a contiguous CPU tensor; the result is the rank that sent.

        Several of one tag are served in the order of their calls, but after receives that name their source, whenever those are called.
        Raises PeerLost if a rank dies before any has sent, and UsageError if this backend must be told the source.
        """
        raise UsageError(f"{type(self).__name__} cannot receive from any source; name the source with recv()")

    @abstractmethod
    def barrier(self, *, timeout_s: float | None = None, label: str = "") -> Pending[None]:
        """Done once every rank has called it."""

    @abstractmethod
    def subgroup(self, members: Sequence[int]) -> "Backend":
        """The same backend over some of its ranks, renumbered from 0 in ascending order, whatever the order of `members`; see `SubBackend`.
        Call it on every member, in the same order relative to other calls."""

    @abstractmethod
    async def aclose(self) -> None:
        """Finish what is under way, tell the peers, free everything. Safe to call twice."""

    @abstractmethod
    def abort(self, why: str = "") -> None:
        """Fail everything that is under way and close at once. Synchronous, safe in `finally` and from any thread.

        The other ranks lose this one. With `why`, in words about this rank ("its disk is full"), their errors say so: these words reach
        each peer that takes them within 0.2 s.
        """

    def refuse(self, error: BaseException, *, label: str = "") -> None:
        """Take no part in this group's next collective, because `error` keeps this rank from it: it fails on all ranks, as by that error,
        and none waits for this one. They can then go on with the collective after it. `label` says what it is for.

        The others get a PeerLost or CollectiveTimeout about the same ranks, a CollectiveMismatch, or otherwise a CollectiveError. Raises
        UsageError if this backend cannot tell them.
        """
        raise UsageError(f"{type(self).__name__} cannot refuse a collective; call abort(), which ends all groups")

    def disband(self, why: str) -> None:
        """End only this group, while other groups of the same ranks go on.

        Its collectives, sends and receives fail, both those under way and those called later: here with ClosedError, and on its other
        ranks, as soon as they hear of it, with CollectiveError. Raises UsageError if this backend has no groups that end alone.
        """
        raise UsageError(f"{type(self).__name__} cannot end one group alone; call abort(), which ends all groups")
