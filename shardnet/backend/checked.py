"""The checks of a collective's arguments, and the tensor that holds its result."""

import weakref
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TypeVar

from shardnet.backend.arguments import as_input, as_output, check_rank, copy, kind, row_sizes, scattered_sizes, seconds
from shardnet.backend.base import Backend, Tensor
from shardnet.backend.pending import Pending
from shardnet.backend.streams import Event, is_on_gpu, join, now
from shardnet.collectives import plans
from shardnet.collectives.group import Group
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.operation import Call
from shardnet.collectives.reduction import ReduceOp
from shardnet.collectives.switchboard import Switchboard
from shardnet.config import Timeouts
from shardnet.errors import SizeMismatchError, UsageError
from shardnet.telemetry import Telemetry

T = TypeVar("T")


class CheckedBackend(Backend):
    """One group of ranks on a switchboard.

    Each of these collectives checks its arguments, makes the tensor of the result unless it is given one, and then calls the method of the
    same name with an underscore. That method moves the data. It is called only for more than one rank, with contiguous, non-empty tensors
    (`_all_to_all` also with empty ones), and with bounds in elements.
    """

    def __init__(self, board: Switchboard, group: Group, timeouts: Timeouts) -> None:
        self._board = board
        self._group = group
        self._timeouts = timeouts
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

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, out: Tensor | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        source = as_input(tensor, op)
        result = as_output(out, tensor, tensor.shape)
        if self.world_size == 1 or not source.numel():
            return self._at_once("all_reduce", copy(source, result))
        return self._all_reduce(self._call("all_reduce", f"{kind(tensor)}, {op}", timeout_s, label, source, result), source, result, op)

    @abstractmethod
    def _all_reduce(self, call: Call, source: Tensor, result: Tensor, op: ReduceOp) -> Pending[Tensor]: ...

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

    @abstractmethod
    def _broadcast(self, call: Call, result: Tensor, root: int) -> Pending[Tensor]:
        """On root, `result` already holds the data."""

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

    @abstractmethod
    def _all_gather(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, after: Event | None) -> Pending[Tensor]: ...

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

    @abstractmethod
    def _reduce_scatter(self, call: Call, source: Tensor, result: Tensor, bounds: Bounds, op: ReduceOp) -> Pending[Tensor]: ...

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

    @abstractmethod
    def _all_to_all(
        self, call: Call, source: Tensor, result: Tensor, send_bounds: Bounds, recv_bounds: Bounds, *, even: bool
    ) -> Pending[Tensor]:
        """`even`: each rank sends the same amount to each other rank, which the signature says. The tensors may be empty."""

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

    def _check_rank(self, rank: int, what: str) -> None:
        check_rank(rank, self.world_size, what)
