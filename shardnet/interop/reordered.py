"""`Reordered`: a group whose ranks do not ascend, as `new_group(ranks, sort_ranks=False)` and
`DeviceMesh(..., preserve_rank_order=True)` make them.

A `Backend` numbers the ranks of a sub-group in ascending order: its routes and the order of its sums follow from that. So this class puts
another numbering in front of it. It translates ranks, and it reorders the blocks, one for each rank, before they are sent or after
they have come, which costs a copy. A group whose ranks ascend does not use this class. Sums are taken in the ascending order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from shardnet.backend import Backend, Pending, ReduceOp
from shardnet.backend.streams import Event, is_on_gpu
from shardnet.errors import InvalidRankError, SizeMismatchError
from shardnet.interop.carrying import put

if TYPE_CHECKING:
    from shardnet.telemetry import Telemetry

Tensor = torch.Tensor
T = TypeVar("T")
U = TypeVar("U")


def in_order(backend: Backend, members: Sequence[int]) -> Backend:
    """The sub-group of these ranks of `backend`, numbered in the given order. Call it on every member, in the same order."""
    if isinstance(backend, Reordered):
        return in_order(backend.ascending, [backend.place(member) for member in members])
    group = backend.subgroup(members)
    return group if list(members) == sorted(members) else Reordered(group, members)


class Reordered(Backend):
    """One rank's end of a group with its own numbering; lives as long as the group. A rank's `place` is its rank in ascending order."""

    def __init__(self, ascending: Backend, members: Sequence[int]) -> None:
        """members  of the group, in the order of their ranks here"""
        in_turn = sorted(members)
        self.ascending = ascending
        self._places = [in_turn.index(member) for member in members]  # by rank
        self._ranks = [self._places.index(place) for place in range(len(in_turn))]  # by place

    def place(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise InvalidRankError(rank, self.world_size)
        return self._places[rank]

    @property
    def rank(self) -> int:
        return self._ranks[self.ascending.rank]

    @property
    def world_size(self) -> int:
        return self.ascending.world_size

    @property
    def telemetry(self) -> "Telemetry":
        return self.ascending.telemetry

    @property
    def node_ranks(self) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted(tuple(sorted(self._ranks[place] for place in node)) for node in self.ascending.node_ranks))

    # --- collectives

    def all_reduce(
        self, tensor: Tensor, op: ReduceOp = ReduceOp.SUM, *, out: Tensor | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        return self.ascending.all_reduce(tensor, op, out=out, timeout_s=timeout_s, label=label)

    def broadcast(
        self, tensor: Tensor, root: int, *, out: Tensor | None = None, timeout_s: float | None = None, label: str = ""
    ) -> Pending[Tensor]:
        return self.ascending.broadcast(tensor, self.place(root), out=out, timeout_s=timeout_s, label=label)

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
        places = self._by_place(sizes)
        pending = self.ascending.all_gather(tensor, sizes=places, after=after, timeout_s=timeout_s, label=label)
        if out is None:
            return _then(pending, tensor, lambda gathered: self._blocks_by_rank(gathered, places))
        return _then(pending, tensor, partial(self._put_by_rank, out, places))

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
        blocks = self._blocks_by_place(tensor, sizes)
        return self.ascending.reduce_scatter(blocks, op, sizes=self._by_place(sizes), out=out, timeout_s=timeout_s, label=label)

    def all_to_all(
        self,
        tensor: Tensor,
        *,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        timeout_s: float | None = None,
        label: str = "",
    ) -> Pending[Tensor]:
        sends, receives = self._by_place(send_sizes), self._by_place(recv_sizes)
        blocks = self._blocks_by_place(tensor, send_sizes)
        pending = self.ascending.all_to_all(blocks, send_sizes=sends, recv_sizes=receives, timeout_s=timeout_s, label=label)
        return _then(pending, tensor, lambda came: self._blocks_by_rank(came, receives))

    def send(self, tensor: Tensor, to: int, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[None]:
        return self.ascending.send(tensor, self.place(to), tag=tag, timeout_s=timeout_s, label=label)

    def recv(self, into: Tensor, source: int, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[Tensor]:
        return self.ascending.recv(into, self.place(source), tag=tag, timeout_s=timeout_s, label=label)

    def recv_any(self, into: Tensor, *, tag: str = "", timeout_s: float | None = None, label: str = "") -> Pending[int]:
        return self.ascending.recv_any(into, tag=tag, timeout_s=timeout_s, label=label).map(self._ranks.__getitem__)

    def barrier(self, *, timeout_s: float | None = None, label: str = "") -> Pending[None]:
        return self.ascending.barrier(timeout_s=timeout_s, label=label)

    # --- groups and the end

    def subgroup(self, members: Sequence[int]) -> Backend:
        return in_order(self, sorted(set(members)))

    async def aclose(self) -> None:
        await self.ascending.aclose()

    def abort(self, why: str = "") -> None:
        self.ascending.abort(why)

    def refuse(self, error: BaseException, *, label: str = "") -> None:
        self.ascending.refuse(error, label=label)

    def disband(self, why: str) -> None:
        self.ascending.disband(why)

    # --- orders

    def _by_place(self, sizes: Sequence[int] | None) -> list[int] | None:
        if sizes is None:
            return None
        if len(sizes) != self.world_size:
            raise SizeMismatchError(self.world_size, len(sizes), "entries in the list of sizes")
        return [sizes[rank] for rank in self._ranks]

    def _blocks_by_place(self, tensor: Tensor, sizes: Sequence[int] | None) -> Tensor:
        blocks = self._blocks(tensor, sizes)
        return torch.cat([blocks[rank] for rank in self._ranks])

    def _blocks_by_rank(self, tensor: Tensor, sizes: Sequence[int] | None) -> Tensor:
        blocks = self._blocks(tensor, sizes)
        return torch.cat([blocks[place] for place in self._places])

    def _put_by_rank(self, target: Tensor, sizes: Sequence[int] | None, gathered: Tensor) -> Tensor:
        put(target, self._blocks_by_rank(gathered, sizes))
        return target

    def _blocks(self, tensor: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
        """The blocks, one for each rank, of equal size if there are no sizes."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if sizes is None and rows % self.world_size:
            raise SizeMismatchError(f"a multiple of {self.world_size}", rows, "rows")
        split = [rows // self.world_size] * self.world_size if sizes is None else list(sizes)
        if sum(split) != rows:
            raise SizeMismatchError(sum(split), rows, "rows (the sum of the sizes)")
        return torch.split(tensor, split)


def _then(pending: Pending[T], tensor: Tensor, function: Callable[[T], U]) -> Pending[U]:
    """A handle for `function` of a pending result that is on the device of `tensor`. It is done when the result is, so that a caller that
    polls sees all of it. But data on a GPU may still be on its way then, and only a call of `wait` makes streams wait for it."""
    return pending.read_as(_Once(function)) if is_on_gpu(tensor) else pending.map(function)


class _Once(Generic[T, U]):
    """A function that only the first caller calls: a later call would overwrite memory that the program may have changed since then."""

    def __init__(self, function: Callable[[T], U]) -> None:
        self._function: Callable[[T], U] | None = function
        self._results: list[U] = []
        self._lock = Lock()

    def __call__(self, argument: T) -> U:
        with self._lock:
            if self._function is not None:
                self._results.append(self._function(argument))
                self._function = None
            return self._results[0]
