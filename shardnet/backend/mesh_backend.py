"""A backend over a mesh: checks the call, makes the result tensor, and hands flat arrays to the collectives."""

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch

from shardnet.backend.arguments import (
    as_input,
    as_output,
    check_pieces,
    check_rank,
    copy,
    disagree_all_to_all,
    disagree_send,
    kind,
    largest,
    row_sizes,
    scattered_sizes,
    seconds,
)
from shardnet.backend.base import Backend, Tensor
from shardnet.backend.node_buffer import NodeBuffer
from shardnet.backend.pending import Pending
from shardnet.backend.staging import Staging
from shardnet.backend.streams import Event, is_on_gpu, join, now
from shardnet.collectives import plans
from shardnet.collectives.commons import Release
from shardnet.collectives.exchange import Exchange
from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds, Hierarchical
from shardnet.collectives.letters import loans, shares
from shardnet.collectives.letters.letter_round import LetterRound, Share
from shardnet.collectives.letters.loan_round import Lending, LoanRound
from shardnet.collectives.letters.mail import Mail
from shardnet.collectives.operation import Algorithm, Call
from shardnet.collectives.parts import Pieces
from shardnet.collectives.reduction import Array, ReduceOp, Reduction, as_array, as_tensor, dtype_name
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Timeouts
from shardnet.errors import InvalidRankError, InvalidWorldSizeError, SelfSendError, SizeMismatchError, UsageError
from shardnet.telemetry import Telemetry

T = TypeVar("T")


class MeshBackend(Backend):
    """One group of ranks on a switchboard.

    Each collective checks its arguments and then calls the method of the same name with an underscore, which subclasses may override. That
    method is called only for more than one rank, with contiguous, non-empty tensors (`_all_to_all` also with empty ones), and with bounds
    in elements.
    """

    _heritage: tuple[Any, ...] = ()  # further constructor arguments of a subclass, with which its sub-groups are made, too

    def __init__(self, board: Switchboard, group: Group, timeouts: Timeouts) -> None:
        self._board = board
        self._group = group
        self._timeouts = timeouts
        self._staging = Staging(board, self._is_on_gpu)
        if group is not board.world:
            weakref.finalize(self, group.release).atexit = False

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.size

    @property
    def telemetry(self) -> Telemetry:
        return self._board.telemetry

    # --- collectives

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, out: Tensor | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        source = as_input(tensor, op)
        result = as_output(out, tensor, tensor.shape)
        if self.world_size == 1 or not source.numel():
            return self._at_once("all_reduce", copy(source, result))
        return self._all_reduce(self._call("all_reduce", f"{kind(tensor)}, {op}", timeout_s, label, source, result), source, result, op)

    def _all_reduce(self, call: Call, source: Tensor, result: Tensor, op: ReduceOp) -> Pending[Tensor]:
        reduction = Reduction(op, source.dtype, self.world_size)
        if self._is_staged(source, result):
            plan = partial(plans.all_reduce, self._group, reduction=reduction)
            return self._staging.begin(self._group, call, plan, source, result, result)
        arrays = as_array(source), as_array(result)
        if (begun := self._by_letter(call, source.nbytes, shares.all_reduce, loans.all_reduce, (*arrays, reduction), result)) is not None:
            return begun
        return self._begin(call, plans.all_reduce(self._group, *arrays, reduction), result)

    def broadcast(
        self, tensor: Tensor, root: int, *, out: Tensor | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        self._check_rank(root, "broadcast root")
        source = as_input(tensor)
        result = as_output(out, tensor, tensor.shape)
        if self.rank == root or not source.numel():
            copy(source, result)
        if self.world_size == 1 or not source.numel():
            return self._at_once("broadcast", result)
        return self._broadcast(self._call("broadcast", f"{kind(tensor)}, root {root}", timeout_s, label, result), result, root)

    def _broadcast(self, call: Call, result: Tensor, root: int) -> Pending[Tensor]:
        """On root, `result` already holds the data."""
        if self._is_staged(result):
            gives, gets = (result, None) if self.rank == root else (None, result)
            plan = lambda given, got: plans.broadcast(self._group, got if gives is None else given, root)  # noqa: E731
            return self._staging.begin(self._group, call, plan, gives, gets, result)
        if (begun := self._by_letter(call, result.nbytes, shares.broadcast, loans.broadcast, (as_array(result), root), result)) is not None:
            return begun
        return self._begin(call, plans.broadcast(self._group, as_array(result), root), result)

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
        source = as_input(tensor)
        rows = source.shape[0] if source.dim() else 1
        shape = row_sizes(sizes, self.world_size, rows, own=self.rank)
        width = prod(source.shape[1:])
        result = as_output(out, tensor, (sum(shape), *source.shape[1:]))
        if self.world_size == 1 or not result.numel():
            if after is not None:
                join(after, source.device)
            return self._at_once("all_gather", copy(source, result))
        detail = kind(tensor) if sizes is None else f"{kind(source, rows=False)}, sizes {shape}"
        call = self._call("all_gather", detail, timeout_s, label, source, result)
        return self._all_gather(call, source, result, plans.bounds_of([size * width for size in shape]), after)

    def _all_gather(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, after: Event | None) -> Pending[Tensor]:
        if self._is_staged(source, result):
            plan = partial(plans.all_gather, self._group, bounds=bounds)
            return self._staging.begin(self._group, call, plan, source, result, result, after)
        arrays = as_array(source), as_array(result)
        if (
            begun := self._by_letter(
                call, largest(bounds) * source.itemsize, shares.all_gather, loans.all_gather, (*arrays, bounds), result
            )
        ) is not None:
            return begun
        return self._begin(call, plans.all_gather(self._group, *arrays, bounds), result)

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
        source = as_input(tensor, op)
        if not source.dim():
            raise SizeMismatchError(f"at least 1 dimension (world size {self.world_size})", "a 0-dim tensor", "in reduce_scatter")
        shape = scattered_sizes(sizes, self.world_size, source.shape[0])
        result = as_output(out, tensor, (shape[self.rank], *source.shape[1:]))
        if self.world_size == 1 or not source.numel():
            return self._at_once("reduce_scatter", copy(source, result))
        detail = f"{kind(tensor)}, {op}" + ("" if sizes is None else f", sizes {shape}")
        call = self._call("reduce_scatter", detail, timeout_s, label, source, result)
        return self._reduce_scatter(call, source, result, plans.bounds_of([size * prod(source.shape[1:]) for size in shape]), op)

    def _reduce_scatter(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, op: ReduceOp) -> Pending[Tensor]:
        reduction = Reduction(op, source.dtype, self.world_size)
        if self._is_staged(source, result):
            plan = partial(plans.reduce_scatter, self._group, bounds=bounds, reduction=reduction)
            return self._staging.begin(self._group, call, plan, source, result, result)
        arrays = as_array(source), as_array(result)
        if (
            begun := self._by_letter(call, source.nbytes, shares.reduce_scatter, loans.reduce_scatter, (*arrays, bounds, reduction), result)
        ) is not None:
            return begun
        return self._begin(call, plans.reduce_scatter(self._group, *arrays, bounds, reduction), result)

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

    def all_to_all(
        self,
        tensor: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Pending[Tensor]:
        source = as_input(tensor)
        rows = source.shape[0] if source.dim() else 1
        if (send_sizes is None) != (recv_sizes is None):
            raise UsageError("all_to_all needs both send_sizes and recv_sizes, or neither")
        if send_sizes is None and rows % self.world_size:
            raise SizeMismatchError(
                f"a multiple of {self.world_size}", rows, "rows to exchange (pass send_sizes and recv_sizes for an uneven split)"
            )
        sends = row_sizes(send_sizes, self.world_size, rows // self.world_size)
        receives = row_sizes(recv_sizes, self.world_size, rows // self.world_size)
        if sum(sends) != rows:
            raise SizeMismatchError(sum(sends), rows, "rows to exchange (the sum of send_sizes)")
        if sends[self.rank] != receives[self.rank]:
            raise SizeMismatchError(
                sends[self.rank], receives[self.rank], "rows from this rank to itself (send_sizes and recv_sizes must agree)"
            )
        result = as_output(None, tensor, (sum(receives), *source.shape[1:]))
        width = prod(source.shape[1:])
        send_bounds = plans.bounds_of([size * width for size in sends])
        recv_bounds = plans.bounds_of([size * width for size in receives])
        if self.world_size == 1:
            return self._at_once("all_to_all", copy(source, result))
        even = kind(tensor) if send_sizes is None else f"{kind(source, rows=False)}, uneven"
        call = self._call("all_to_all", even, timeout_s, label, source)
        return self._all_to_all(call, source, result, send_bounds, recv_bounds, even=send_sizes is None)

    def _all_to_all(
        self, call: Call, source: Tensor, result: Tensor, send_bounds: Bounds, recv_bounds: Bounds, *, even: bool
    ) -> Pending[Tensor]:
        """`even`: each rank sends the same amount to each other rank, which the signature says. The tensors may be empty."""
        if self._is_staged(source):
            plan = partial(self._exchange, send_bounds=send_bounds, recv_bounds=recv_bounds, even=even)
            return self._staging.begin(self._group, call, plan, source, result, result)
        outgoing, incoming = as_array(source), as_array(result)
        if even:  # only where the signature settles the sizes: see `_exchange`
            arrays = outgoing, incoming, largest(send_bounds)
            if (begun := self._by_letter(call, source.nbytes, shares.all_to_all, loans.all_to_all, arrays, result)) is not None:
                return begun
        return self._begin(call, self._exchange(outgoing, incoming, send_bounds, recv_bounds, even=even), result)

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

    def abort(self) -> None:
        self._board.abort()

    def disband(self, why: str) -> None:
        self._group.disband(why)

    # --- helpers

    @staticmethod
    def _is_on_gpu(tensor: Tensor) -> bool:
        """Whether a tensor's bytes have to be copied to the CPU before they can be sent."""
        return is_on_gpu(tensor)

    def _is_staged(self, *tensors: Tensor) -> bool:
        return any(map(self._is_on_gpu, tensors))

    def _call(self, op: str, detail: str, timeout_s: float | None, label: str, *tensors: Tensor, on_the_wire: str = "") -> Call:
        self._board.check_ours()
        if any(map(is_on_gpu, tensors)):
            detail += " on a GPU"  # because the same collective of CPU tensors may use another algorithm
        return Call(op, label, detail, self._timeouts.collective_s if timeout_s is None else seconds(timeout_s), on_the_wire or op)

    def _at_once(self, op: str, result: T) -> Pending[T]:
        """The handle of a collective that needs no traffic."""
        self._group.check_open()
        done = Pending.done_with(result, op)
        if isinstance(result, Tensor) and is_on_gpu(result):
            done.arrives(partial(join, now(result.device), result.device))
        return done

    def _begin(self, call: Call, algorithm: Algorithm, result: Tensor) -> Pending[Tensor]:
        return Pending(self._group.operations.begin(call, algorithm, result), call.op)

    def _mail(self, bytes: int) -> Mail | None:
        """The mailboxes for a collective in which no rank sends more than `bytes`; None if letters cannot hold its data."""
        mail = self._group.mail
        return mail if mail is not None and bytes <= mail.largest else None

    @property
    def _lending_mail(self) -> Mail | None:
        """The mailboxes for a collective of any size, if letters may say where the data is; otherwise None."""
        mail = self._group.mail
        return mail if mail is not None and mail.lends else None

    def _by_letter(
        self, call: Call, bytes: int, small: Callable[..., Share], large: Callable[..., Lending], args: tuple[Any, ...], result: T
    ) -> Pending[T] | None:
        """Begin a collective by letters, if there are any. If letters may hold `bytes`, the most that any rank sends, they hold the data,
        and `small` makes a Share of `args`; otherwise they say where the data is, and `large` makes a Lending of them."""
        if (mail := self._mail(bytes)) is not None:
            return Pending(self._group.rounds.begin(mail, LetterRound(mail, call, small(self._group, *args), result)), call.op)
        if (mail := self._lending_mail) is not None:
            return Pending(self._group.rounds.begin(mail, LoanRound(mail, call, large(self._group, *args), result)), call.op)
        return None

    def _channel(self, other: int, tag: str, *, sending: bool) -> AbstractContextManager[Group]:
        """The two-rank group to or from another rank."""
        self._check_rank(other, "peer")
        if other == self.rank:
            raise SelfSendError(self.rank)
        return self._group.channels.channel(*((self.rank, other) if sending else (other, self.rank)), tag)

    def _check_rank(self, rank: int, what: str) -> None:
        check_rank(rank, self.world_size, what)


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
