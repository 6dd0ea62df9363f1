"""What the copies and sums of a collective in memory take alone: each rank does its own and waits for nobody.

The bytes, the system calls and the size of the pieces that are added up are shardnet's, but the ranks exchange no messages. So any
time that an engine takes beyond this goes into messages, and no engine that copies once takes less.
"""

import os
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.plan import Case, Op
from benchmarks.race import Contender
from benchmarks.targets import COPIES
from shardnet.collectives.parts import PIECE_BYTES
from shardnet.errors import ProtocolError
from shardnet.pb import mesh_pb2
from shardnet.transport.shared_memory.lending import Borrowed, Loan

PIECE = PIECE_BYTES // 4  # elements of float32 that are read and added at once


def copies(case: Case) -> Contender | None:
    """None for a case that copies in another way, or if ranks cannot read each other's memory. A collective."""
    if case.op is Op.GATHER_ON_NODE:
        return None
    alone = _Alone(case)
    return Contender(COPIES, alone.run, calls=case.calls) if alone.is_possible() else None


class _Alone:
    """One rank with two tensors that the others read: its own numbers, and results, which an all_reduce passes on.

    Nobody waits, so a rank may read another one's results at any stage of their making.
    """

    def __init__(self, case: Case) -> None:
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._part = case.bytes // 4 // self._ranks
        # The same kind of memory as the engines' tensors: numpy would ask for huge pages, and copies from those are faster.
        self._given, self._result = (torch.ones(self._part * self._ranks).numpy() for _ in range(2))
        self._piece = np.empty(PIECE, np.float32)
        self._loan = Loan()
        mine = [self._loan.of(array.data).SerializeToString() for array in (self._given, self._result)]
        told: list[tuple[int, list[bytes]]] = [(0, [])] * self._ranks
        dist.all_gather_object(told, (os.getpid(), mine))
        offers = [[Borrowed.of(pid, mesh_pb2.Loan.FromString(offer)) for offer in offers] for pid, offers in told]
        self._givens, self._results = ([pair[which] for pair in offers] for which in (0, 1))
        self.run: Callable[[], None] = {Op.ALL_GATHER: self._all_gather, Op.REDUCE_SCATTER: self._reduce_scatter}.get(
            case.op, self._all_reduce
        )

    def is_possible(self) -> bool:
        possible = torch.ones(1)
        try:
            self._read(self._givens[(self._rank + 1) % self._ranks], 0, self._result[:1])
        except ProtocolError:
            possible.zero_()
        dist.all_reduce(possible, dist.ReduceOp.MIN)
        return bool(possible)

    def _all_gather(self) -> None:
        """Each rank has its shard at the beginning of what it gives."""
        for rank in range(self._ranks):
            self._take(rank, self._givens, 0, self._slot(rank))

    def _reduce_scatter(self) -> None:
        """The sums go where an all_reduce passes them on."""
        own = self._slot(self._rank)
        for start in range(0, self._part, PIECE):
            total = own[start : start + PIECE]
            self._take(0, self._givens, self._part * self._rank + start, total)
            for rank in range(1, self._ranks):
                np.add(total, self._of(rank, self._part * self._rank + start, len(total)), out=total)

    def _all_reduce(self) -> None:
        self._reduce_scatter()
        for rank in range(self._ranks):
            if rank != self._rank:
                self._take(rank, self._results, self._part * rank, self._slot(rank))

    def _of(self, rank: int, start: int, count: int) -> "np.ndarray":
        """What to add next: this rank's own data in place, another rank's read into the piece."""
        if rank == self._rank:
            return self._given[start : start + count]
        self._read(self._givens[rank], start, self._piece[:count])
        return self._piece[:count]

    def _slot(self, rank: int) -> "np.ndarray":
        return self._result[self._part * rank : self._part * (rank + 1)]

    def _take(self, rank: int, offers: list[Borrowed], start: int, target: "np.ndarray") -> None:
        if rank == self._rank:
            target[:] = self._given[start : start + len(target)]
        else:
            self._read(offers[rank], start, target)

    def _read(self, offer: Borrowed, start: int, target: "np.ndarray") -> None:
        offer.read(start * target.itemsize, target)
