"""A backend over a mesh: hands the flat arrays of a checked call to the collectives, in the fastest way that there is."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch

from shardnet.backend.arguments import (
    as_input,
    as_output,
    check_pieces,
    disagree_all_to_all,
    disagree_send,
    kind,
    largest,
    row_sizes,
    scattered_sizes,
)
from shardnet.backend.base import Tensor
from shardnet.backend.checked import CheckedBackend
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.backend.pending import Pending
from shardnet.backend.staging import Staging
from shardnet.backend.streams import Event, is_on_gpu
from shardnet.collectives import plans
from shardnet.collectives.commons import Release
from shardnet.collectives.exchange import Exchange
from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds, Hierarchical
from shardnet.collectives.letters import loans, shares
from shardnet.collectives.letters.letter_round import LetterRound, Share
from shardnet.collectives.letters.loan_round import Lending, LoanRound
from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.operation import Algorithm, Call, Operation
from shardnet.collectives.parts import Pieces
from shardnet.collectives.reduction import Array, ReduceOp, Reduction, as_array, as_tensor, dtype_name
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Timeouts
from shardnet.errors import CollectiveError, InvalidRankError, InvalidWorldSizeError, SelfSendError, UsageError

T = TypeVar("T")


class Ways(NamedTuple):
    """The ways in which the data of a collective may go; each is made from the group and the same arguments."""

    letters: Callable[..., Share]  # that hold the data
    loans: Callable[..., Lending]  # letters that say where the data is
    streams: Callable[..., Algorithm]


_ALL_REDUCE = Ways(shares.all_reduce, loans.all_reduce, plans.all_reduce)
_ALL_GATHER = Ways(shares.all_gather, loans.all_gather, plans.all_gather)
_BROADCAST = Ways(shares.broadcast, loans.broadcast, plans.broadcast)
_REDUCE_SCATTER = Ways(shares.reduce_scatter, loans.reduce_scatter, plans.reduce_scatter)


class MeshBackend(CheckedBackend):
    """One group of ranks on a switchboard, whose mesh carries the data."""

    _heritage: tuple[Any, ...] = ()  # further constructor arguments of a subclass, with which its sub-groups are made, too

    def __init__(self, board: Switchboard, group: Group, timeouts: Timeouts) -> None:
        super().__init__(board, group, timeouts)
        self._staging = Staging(board, self._is_on_gpu)

    # --- collectives

    def _all_reduce(self, call: Call, source: Tensor, result: Tensor, op: ReduceOp) -> Pending[Tensor]:
        reduction = Reduction(op, source.dtype, self.world_size)
        if self._is_staged(source, result):
            plan = partial(plans.all_reduce, self._group, reduction=reduction)
            return self._staging.begin(self._group, call, plan, source, result, result)
        return self._begin(call, _ALL_REDUCE, (as_array(source), as_array(result), reduction), source.nbytes, result)

    def _broadcast(self, call: Call, result: Tensor, root: int) -> Pending[Tensor]:
        if self._is_staged(result):
            gives, gets = (result, None) if self.rank == root else (None, result)
            plan = lambda given, got: plans.broadcast(self._group, got if gives is None else given, root)  # noqa: E731
            return self._staging.begin(self._group, call, plan, gives, gets, result)
        return self._begin(call, _BROADCAST, (as_array(result), root), result.nbytes, result)

    def _all_gather(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, after: Event | None) -> Pending[Tensor]:
        if self._is_staged(source, result):
            plan = partial(plans.all_gather, self._group, bounds=bounds)
            return self._staging.begin(self._group, call, plan, source, result, result, after)
        return self._begin(call, _ALL_GATHER, (as_array(source), as_array(result), bounds), largest(bounds) * source.itemsize, result)

    def all_gather_on_node(
        self, tensor: Tensor, *, sizes: Sequence[int] | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[NodeBuffer]:
        source = as_input(tensor)
        if self._is_staged(source):
            return super().all_gather_on_node(tensor, sizes=sizes, timeout_s=timeout_s, label=label)
        rows = source.shape[0] if source.dim() else 1
        shape = row_sizes(sizes, self.world_size, rows, own=self.rank)
        width = prod(source.shape[1:])
        bounds = plans.bounds_of([size * width for size in shape])
        if not self._fits_commons(bounds, source.itemsize):
            return super().all_gather_on_node(tensor, sizes=sizes, timeout_s=timeout_s, label=label)
        detail = f"{kind(source, rows=False)}, sizes {shape}"
        call = self._call("all_gather", detail, timeout_s, label, on_the_wire="all_gather_on_node")
        return self._gather_on_node(call, source, bounds, (sum(shape), *source.shape[1:]))

    def broadcast_on_node(self, tensor: Tensor, root: int, *, timeout_s: float | None = None, label: str = "") -> Pending[NodeBuffer]:
        self._check_rank(root, "broadcast root")
        source = as_output(tensor, tensor, None, "tensor")
        bounds = plans.bounds_of([source.numel() if rank == root else 0 for rank in range(self.world_size)])
        if self._is_staged(source) or not self._fits_commons(bounds, source.itemsize):
            return super().broadcast_on_node(tensor, root, timeout_s=timeout_s, label=label)
        call = self._call("broadcast", f"{kind(tensor)}, root {root}", timeout_s, label, on_the_wire="broadcast_on_node")
        return self._gather_on_node(call, source if self.rank == root else source.new_empty(0), bounds, source.shape)

    def _gather_on_node(self, call: Call, source: Tensor, bounds: Bounds, shape: Sequence[int]) -> Pending[NodeBuffer]:
        """`source` is this rank's part of the result, `shape` the shape of the whole result."""

        def finish(whole: Array, release: Release | None) -> NodeBuffer:
            return NodeBuffer(as_tensor(whole, source.dtype).view(*shape), release)

        def result(gathered: Hierarchical) -> NodeBuffer:
            whole, release = gathered.output, None
            if gathered.commons is not None and gathered.claim.granted:
                mine, release = gathered.commons.lend(gathered.claim)
                whole = mine.view(whole.dtype)
            return finish(whole, release)

        if (mail := self._lending_mail) is not None:
            lending = loans.all_gather_on_node(self._group, as_array(source), bounds, finish)
            return Pending(self._group.rounds.begin(mail, LoanRound(mail, call, lending, None)), call.op)
        gather = plans.all_gather_on_node(self._group, as_array(source), bounds)
        return Pending(self._group.operations.begin(call, gather.run, gather), call.op).map(result)

    def _fits_commons(self, bounds: Bounds, itemsize: int) -> bool:
        """Whether a gather is large enough to go into one buffer per node: a small one reaches the waiting threads sooner by letter."""
        return self._mail(bounds[-1][1] * itemsize) is None and plans.fits_commons(self._group, bounds, itemsize)

    @property
    def shares_node(self) -> bool:
        return self._group.route.nodes < self._group.size and self._board.mesh.shares_memory

    def _reduce_scatter(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, op: ReduceOp) -> Pending[Tensor]:
        reduction = Reduction(op, source.dtype, self.world_size)
        if self._is_staged(source, result):
            plan = partial(plans.reduce_scatter, self._group, bounds=bounds, reduction=reduction)
            return self._staging.begin(self._group, call, plan, source, result, result)
        return self._begin(call, _REDUCE_SCATTER, (as_array(source), as_array(result), bounds, reduction), source.nbytes, result)

    def reduce_scatter_pieces(
        self,
        pieces: Sequence[Tensor],
        op: ReduceOp = ReduceOp.SUM,
        *,
        sizes: Sequence[int] | None = None,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Pending[Tensor]:
        if (mail := self._mail_of_pieces(pieces)) is None:
            return super().reduce_scatter_pieces(pieces, op, sizes=sizes, timeout_s=timeout_s, label=label)
        source = Pieces(as_array(as_input(piece, op)) for piece in pieces)
        shape = scattered_sizes(sizes, self.world_size, len(source))
        result = torch.empty(shape[self.rank], dtype=pieces[0].dtype, device="cpu")
        detail = f"{dtype_name(result.dtype)} [{len(source)}], {op}" + ("" if sizes is None else f", sizes {shape}")
        call = self._call("reduce_scatter", detail, timeout_s, label)
        reduction = Reduction(op, result.dtype, self.world_size)
        lending = loans.reduce_scatter_pieces(self._group, source, as_array(result), plans.bounds_of(shape), reduction)
        return Pending(self._group.rounds.begin(mail, LoanRound(mail, call, lending, result)), call.op)

    def all_reduce_pieces(
        self, pieces: Sequence[Tensor], op: ReduceOp = ReduceOp.SUM, *, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        if (mail := self._mail_of_pieces(pieces)) is None:
            return super().all_reduce_pieces(pieces, op, timeout_s=timeout_s, label=label)
        source = Pieces(as_array(as_input(piece, op)) for piece in pieces)
        result = torch.empty(len(source), dtype=pieces[0].dtype, device="cpu")
        call = self._call("all_reduce", f"{kind(result)}, {op}", timeout_s, label)
        lending = loans.all_reduce_pieces(self._group, source, as_array(result), Reduction(op, result.dtype, self.world_size))
        return Pending(self._group.rounds.begin(mail, LoanRound(mail, call, lending, result)), call.op)

    def _mail_of_pieces(self, pieces: Sequence[Tensor]) -> Mail | None:
        """The mailboxes for a collective that reads the pieces where they are; None if these have to be put together."""
        check_pieces(pieces)
        if not self.lends_pieces or self._is_staged(*pieces) or self._mail(sum(piece.nbytes for piece in pieces)) is not None:
            return None
        return self._lending_mail

    @property
    def lends_pieces(self) -> bool:
        return self._lending_mail is not None

    def _all_to_all(
        self, call: Call, source: Tensor, result: Tensor, send_bounds: Bounds, recv_bounds: Bounds, *, even: bool
    ) -> Pending[Tensor]:
        if self._is_staged(source):
            plan = partial(self._exchange, send_bounds=send_bounds, recv_bounds=recv_bounds, even=even)
            return self._staging.begin(self._group, call, plan, source, result, result)
        arrays = as_array(source), as_array(result)
        exchange = partial(self._exchange, *arrays, send_bounds, recv_bounds, even=even)
        if not even:  # the signature does not settle the sizes: see `_exchange`
            return Pending(self._group.operations.begin(call, exchange(), result), call.op)
        ways = Ways(shares.all_to_all, loans.all_to_all, lambda *_: exchange())
        return self._begin(call, ways, (*arrays, largest(send_bounds)), source.nbytes, result)

    def _exchange(self, outgoing: Array, incoming: Array, send_bounds: Bounds, recv_bounds: Bounds, *, even: bool) -> Algorithm:
        incoming[slice(*recv_bounds[self.rank])] = outgoing[slice(*send_bounds[self.rank])]
        return Exchange(
            {peer: outgoing[slice(*send_bounds[peer])] for peer in self._group.peers},
            {peer: incoming[slice(*recv_bounds[peer])] for peer in self._group.peers},
            self._group.peers,
            # An uneven one waits until every pair has compared sizes: a rank that got its data early could not be told that others failed.
            eager=even and plans.is_small(self._group, send_bounds, outgoing.itemsize),
            disagree=disagree_all_to_all,
        ).run

    def send(self, tensor: Tensor, to: int, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[None]:
        source = as_input(tensor)
        call = self._call("send", dtype_name(tensor.dtype), timeout_s, label, on_the_wire="send/recv")
        with self._channel(to, tag, sending=True) as channel:
            peer = 1 - channel.rank
            turns = self._board.turns
            plan = lambda given, _: Exchange({peer: given}, {}, [peer], disagree=disagree_send(source), turns=turns).run  # noqa: E731
            return self._staging.begin(channel, call, plan, source, None, None)

    def recv(self, into: Tensor, source: int, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[Tensor]:
        result = as_output(into, into, None, "into")
        call = self._call("recv", dtype_name(into.dtype), timeout_s, label, on_the_wire="send/recv")
        with self._channel(source, tag, sending=False) as channel:
            peer = 1 - channel.rank
            turns = self._board.turns
            plan = lambda _, got: Exchange({}, {peer: got}, [peer], disagree=disagree_send(into), turns=turns).run  # noqa: E731
            return self._staging.begin(channel, call, plan, None, result, result)

    def recv_any(self, into: Tensor, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[int]:
        result = as_output(into, into, None, "into")
        if is_on_gpu(result):
            raise UsageError("recv_any needs a CPU tensor, got one on a GPU; receive on the CPU and copy, or name the source with recv()")
        if self.world_size == 1:
            raise UsageError("recv_any: there is no other rank that could send")

        def receive(channel: Group) -> Algorithm:
            peer = 1 - channel.rank
            return Exchange({}, {peer: as_array(result)}, [peer], disagree=disagree_send(into), turns=self._board.turns).run

        call = self._call("recv", dtype_name(into.dtype), timeout_s, label, on_the_wire="send/recv")
        begun = self._group.channels.receive_from_any(call, receive, tag)
        return Pending(begun, call.op).map(self._group.members.index)

    def barrier(self, *, timeout_s: float | None = None, label: str = "") -> Pending[None]:
        if self.world_size == 1:
            return self._at_once("barrier", None)
        call = self._call("barrier", "", timeout_s, label)
        if (mail := self._mail(0)) is not None:
            return Pending(self._group.rounds.begin(mail, LetterRound(mail, call, shares.barrier(), None)), call.op)
        return Pending(self._group.operations.begin(call, plans.barrier(self._group), None), "barrier")

    # --- groups and the end

    @property
    def node_ranks(self) -> tuple[tuple[int, ...], ...]:
        return self._group.nodes

    def subgroup(self, members: Sequence[int]) -> "SubBackend":
        return SubBackend(self, members)

    async def aclose(self) -> None:
        if not self._board.is_inherited:
            await self._board.loop.run_here(self._board.aclose())

    def abort(self, why: str = "") -> None:
        self._board.abort(why)

    def refuse(self, error: BaseException, *, label: str = "") -> None:
        async def fail(_: Operation) -> None:
            raise error if isinstance(error, CollectiveError) else CollectiveError(f"{type(error).__name__}: {error}")

        self._group.operations.begin(self._call("refusal", "", None, label), fail, None)

    def disband(self, why: str) -> None:
        self._group.disband(why)

    # --- helpers

    @staticmethod
    def _is_on_gpu(tensor: Tensor) -> bool:
        """Whether a tensor's bytes have to be copied to the CPU before they can be sent."""
        return is_on_gpu(tensor)

    def _is_staged(self, *tensors: Tensor) -> bool:
        return any(map(self._is_on_gpu, tensors))

    def _begin(self, call: Call, ways: Ways, args: tuple[Any, ...], bytes: int, result: T) -> Pending[T]:
        """Begin a collective in the fastest way that there is. `bytes` is the most that any rank sends."""
        group = self._group
        if (mail := self._mail(bytes)) is not None:
            return Pending(group.rounds.begin(mail, LetterRound(mail, call, ways.letters(group, *args), result)), call.op)
        if (mail := self._lending_mail) is not None:
            return Pending(group.rounds.begin(mail, LoanRound(mail, call, ways.loans(group, *args), result)), call.op)
        return Pending(group.operations.begin(call, ways.streams(group, *args), result), call.op)

    def _mail(self, bytes: int) -> Mail | None:
        """The mailboxes for a collective in which no rank sends more than `bytes`; None if letters cannot hold its data."""
        mail = self._group.mail
        return mail if mail is not None and bytes <= mail.largest else None

    @property
    def _lending_mail(self) -> Mail | None:
        """The mailboxes for a collective of any size, if letters may say where the data is; otherwise None."""
        mail = self._group.mail
        return mail if mail is not None and mail.lends else None

    def _channel(self, other: int, tag: str, *, sending: bool) -> AbstractContextManager[Group]:
        """The two-rank group to or from another rank."""
        self._check_rank(other, "peer")
        if other == self.rank:
            raise SelfSendError(self.rank)
        return self._group.channels.channel(*((self.rank, other) if sending else (other, self.rank)), tag)


class SubBackend(MeshBackend):
    """Some ranks of a parent backend. Members are sorted and deduplicated; every collective works on them unchanged.

    Make it on every member, in the same order relative to other sub-groups of the same members. The parent owns the connections: `aclose`
    leaves them open, and `abort` aborts the parent, which ends every group on them. When no member refers to the group any more, its
    memory is freed.
    """

    def __init__(self, parent: MeshBackend, members: Sequence[int]) -> None:
        if not isinstance(members, Iterable):
            raise UsageError(f"members of a sub-group must be a list of ranks, such as [0, 2], got {members!r}")
        for member in (members := list(members)):
            parent._check_rank(member, "sub-group member")
        self.members = tuple(sorted(set(members)))  # ranks of the parent
        if not self.members:
            raise InvalidWorldSizeError("a sub-group needs at least one member")
        if parent.rank not in self.members:
            message = (
                f"rank {parent.rank} of {parent.world_size} is not a member of the sub-group {list(self.members)}; "
                "call subgroup() on its members only"
            )
            raise InvalidRankError(parent.rank, parent.world_size, message=message)
        board = parent._board
        group = board.group(tuple(parent._group.members[member] for member in self.members))
        super().__init__(board, group, parent._timeouts, *parent._heritage)

    def to_global(self, local: int) -> int:
        """The parent's rank of a member."""
        self._check_rank(local, "member")
        return self.members[local]

    def to_local(self, rank: int) -> int | None:
        """The rank in this group of a rank of the parent; None if it is no member."""
        return self.members.index(rank) if rank in self.members else None

    async def aclose(self) -> None:
        """Nothing to do: the parent owns the connections."""
