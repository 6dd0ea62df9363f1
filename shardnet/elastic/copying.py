"""Making the state of a step safe: on all ranks or on none.

[Note: all or none] A rank writes the new generation beside the one before it, never over it, and entrusts its pieces to
another rank. Then comes a barrier. Only a rank that has passed it takes the new generation for committed and may overwrite the old one.
So whenever a rank dies, there are two cases. Either no rank has passed the barrier, and all survivors still have the old generation; or
some rank has, and then all ranks have written everything of the new one. Afterwards the survivors compare what they have to find out
which generation counts: choice.py.
"""

import asyncio
from dataclasses import dataclass
from typing import Any

import torch

from shardnet.backend import Backend, Pending
from shardnet.elastic.choice import keeper
from shardnet.elastic.generation import Generation


@dataclass(frozen=True, slots=True)
class _Row:
    """What each rank tells all others before it sends."""

    header_bytes: int
    payload_bytes: int
    joiners: int

    def tensor(self) -> torch.Tensor:
        return torch.tensor([[self.header_bytes, self.payload_bytes, self.joiners]], device="cpu")


class Copying:
    """The exchange of copies in one epoch; thrown away when any member changes."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._keeper = keeper(backend.rank, backend.node_ranks)
        ranks = range(backend.world_size)
        self._entrusting = next(rank for rank in ranks if keeper(rank, backend.node_ranks) == backend.rank)

    async def commit(self, generation: Generation, joiners: int) -> bool:
        """Complete a generation after its own snapshots were taken. Returns whether any rank has heard of workers that wait to join.

        Raises CollectiveMismatch on all ranks if they are not at the same step.
        """
        spread, entrusted, label = generation.spread, generation.entrusted, f"commit of step {generation.mark.step}"
        mine = _Row(spread.header.numel(), spread.payload.numel(), joiners)
        rows = [_Row(*row) for row in (await self._backend.all_gather(mine.tensor(), label=label)).tolist()]
        generation.has_entrusted = self._backend.world_size > 1 and rows[self._entrusting].payload_bytes > 0
        theirs = rows[self._entrusting]
        pending: list[Pending[Any]] = []
        if generation.has_entrusted:
            entrusted.prepare(theirs.header_bytes, theirs.payload_bytes)
            pending.append(self._backend.recv(entrusted.header, self._entrusting, label=label))
            pending.append(self._backend.recv(entrusted.payload, self._entrusting, label=label))
        if self._backend.world_size > 1 and mine.payload_bytes > 0:
            pending.append(self._backend.send(spread.header, self._keeper, label=label))
            pending.append(self._backend.send(spread.payload, self._keeper, label=label))
        for outcome in await asyncio.gather(*pending, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
        generation.complete = True
        await self._backend.barrier(label=label)
        return any(row.joiners for row in rows)
