"""`TorchGroup`: a torch process group that moves bytes between the ranks of a group."""

import time
from collections.abc import Collection, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from shardnet.backend.torch_source import TorchSource
from shardnet.collectives.hierarchical import Bounds
from shardnet.collectives.operation import Operation
from shardnet.config import NodeEngine
from shardnet.errors import ClosedError, StateError

Tensor = torch.Tensor
_SLICE = timedelta(seconds=0.05)  # how soon a thread that waits for gloo notices that the result is no longer wanted
_BEHIND_S = 1.0  # torch gives up a collective this much later than shardnet, whose error says more
_LOSSY = 2  # a gather pads its parts, unless that makes more than this many times their bytes


class TorchGroup:
    """One process group, made at its first use. All its ranks make the same calls in the same order, each on one thread.

    Tensors are flat and of bytes, because torch and NCCL do not carry all dtypes; bounds are bytes. On a GPU everything is in the order of
    the current stream, and the host never waits; on the CPU each call returns when it is done.

    Each call is part of `operation`. Calls raise RuntimeError if torch does: a rank of the group is gone, or the time is over.
    """

    def __init__(
        self, source: TorchSource, name: str, rank: int, ranks: Sequence[int], members: Sequence[int], near: Collection[int]
    ) -> None:
        """`ranks` are some ranks of the collectives' group, `rank` is this one among them, `members` are the same as global ranks, and
        `near` are all global ranks of this node."""
        self.rank = ranks.index(rank)
        self.size = len(ranks)
        self.peers = [each for each in ranks if each != rank]
        self.operation: Operation | None = None
        self._members = tuple(members)
        self._near = frozenset(near)
        self._source = source
        self._name = name
        self._group: Any = None
        self._wanted = True

    # --- movement (its thread)

    def gather(self, whole: Tensor, bounds: Bounds) -> None:
        """Fill each rank's part of `whole` from that rank, which already has its own part there."""
        sizes = _sizes(bounds)
        group, most = self._made(), max(sizes)
        if not most:
            return
        if min(sizes) == most and _are_adjacent(bounds):
            own = whole[slice(*bounds[self.rank])]
            self._count([most] * self.size, sizes)
            self._finish(group._allgather_base(whole[bounds[0][0] : bounds[-1][1]], own, self._options(c10d.AllgatherOptions)))
        elif most * self.size > _LOSSY * sum(sizes):
            for rank, part in enumerate(bounds):
                self.broadcast(whole[slice(*part)], rank)
        else:
            padded = torch.empty(most * self.size, dtype=torch.uint8, device=whole.device)
            mine = torch.empty(most, dtype=torch.uint8, device=whole.device)
            mine[: sizes[self.rank]].copy_(whole[slice(*bounds[self.rank])])
            self._count([most] * self.size, [most] * self.size)
            self._finish(group._allgather_base(padded, mine, self._options(c10d.AllgatherOptions)))
            for rank, (start, end) in enumerate(bounds):
                if rank != self.rank:
                    whole[start:end].copy_(padded[rank * most :][: end - start])

    def exchange(self, whole: Tensor, bounds: Bounds, target: Tensor, places: Bounds) -> None:
        """Send each rank its part of `whole`, and put what comes from it into its place in `target`."""
        sizes, expected = _sizes(bounds), _sizes(places)
        outgoing = whole[bounds[0][0] : bounds[-1][1]] if _are_adjacent(bounds) else torch.cat([whole[slice(*part)] for part in bounds])
        direct = _are_adjacent(places)
        incoming = target[places[0][0] : places[-1][1]] if direct else outgoing.new_empty(sum(expected))
        self._count(sizes, expected)
        self._finish(self._made().alltoall_base(incoming, outgoing, expected, sizes, self._options(c10d.AllToAllOptions)))
        if not direct:
            for part, (start, end) in zip(torch.split(incoming, expected), places, strict=True):
                target[start:end].copy_(part)

    def broadcast(self, data: Tensor, root: int) -> None:
        """Root's `data` on all ranks."""
        group, size = self._made(), len(data)
        if not size:
            return
        options = self._options(c10d.BroadcastOptions)
        options.rootRank, options.rootTensor = root, 0
        self._count([size if self.rank == root else 0] * self.size, [size if rank == root else 0 for rank in range(self.size)])
        self._finish(group.broadcast([data], options))

    # --- the end

    def give_up(self) -> None:
        """Make calls that wait fail. Any thread."""
        self._wanted = False

    def dispose(self, *, broken: bool) -> None:
        """Close its connections; waits for what is under way, which ends when the first rank of the group does this. On its own thread."""
        group, self._group = self._group, None
        if group is not None and self._source.engine is NodeEngine.NCCL:
            if broken:
                group.abort()
            else:
                group.shutdown()

    # --- helpers

    def _made(self) -> Any:
        if not self._wanted:
            raise ClosedError("the process group is closed")
        if self._group is None:
            self._group = self._source.make(self._name, self.rank, self.size, lambda: self._wanted)
        return self._group

    def _options(self, kind: Any) -> Any:
        left_s = 0.0 if self.operation is None else self.operation.deadline - time.monotonic()
        options = kind()
        options.timeout = timedelta(seconds=max(0.0, left_s) + _BEHIND_S)
        return options

    def _count(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Count bytes by rank as if they went directly; only torch knows how it routes them."""
        if (op := self.operation) is None:
            return
        for rank, member in enumerate(self._members):
            if rank == self.rank:
                continue
            near = member in self._near
            op.flight.bytes_sent += sent[rank]
            op.group.telemetry.count_sent(sent[rank], near=(member,) if near else (), far=() if near else (member,))
            op.group.telemetry.count_received(member, received[rank], near=near)

    def _finish(self, work: Any) -> None:
        """Wait for the work; on a GPU only the current stream waits."""
        if self._source.engine is NodeEngine.NCCL:
            work.wait()
            return
        while not work.is_completed():
            try:
                work.wait(_SLICE)
            except RuntimeError:
                if not self._wanted and not work.is_completed():
                    raise StateError("the collective was given up") from None
        work.wait()  # raises its error, if it has one


def _sizes(bounds: Bounds) -> list[int]:
    return [end - start for start, end in bounds]


def _are_adjacent(bounds: Bounds) -> bool:
    return all(before[1] == after[0] for before, after in pairwise(bounds))
