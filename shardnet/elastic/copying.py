"""Making the state of a step safe: on all ranks or on none.

[Note: all or none] A rank writes the new generation beside the one before it, never over it, and entrusts its pieces to
another rank. Then comes a barrier. Only a rank that has passed it takes the new generation for committed and may overwrite the old one.
So whenever a rank dies, there are two cases. Either no rank has passed the barrier, and all survivors still have the old generation; or
some rank has, and then all ranks have written everything of the new one. Afterwards the survivors compare what they have to find out
which generation counts: choice.py.

[Note: handing over] Then each part is on two ranks, or on all that hold it anyway. A rank that leaves takes its copies with it; until the
next epoch has its state, one loss more could be too much. So before any rank leaves, each part gets new copies until it is on two ranks
that stay, if as many stay. Those that leave wait for that: if it fails because another rank dies, they are still there.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardnet.backend import Backend, Pending
from shardnet.elastic.choice import handovers, keeper, replicas
from shardnet.elastic.generation import Generation
from shardnet.state import Snapshot, Span


@dataclass(frozen=True, slots=True)
class _Row:
    """What each rank tells all others before it sends."""

    header_bytes: int
    payload_bytes: int
    joiners: int
    spares: int
    is_saving: int

    def tensor(self) -> torch.Tensor:
        return torch.tensor([[self.header_bytes, self.payload_bytes, self.joiners, self.spares, self.is_saving]], device="cpu")


class Waiting(NamedTuple):
    """What may begin the next epoch, or put it off, as all ranks know it."""

    joiners: bool = False  # any rank has heard of workers that wait for it
    spares: bool = False  # and of such that have no room there unless a rank leaves
    is_saving: bool = False  # any rank is still writing a checkpoint


class Copying:
    """The exchange of copies in one epoch; thrown away when any member changes."""

    def __init__(self, backend: Backend, held: Sequence[Mapping[str, Span]]) -> None:
        """`held`: of each rank what it holds of the parameters that are spread over ranks, by name."""
        self._backend = backend
        self._alike = replicas(held)
        self._keeper = keeper(backend.rank, backend.node_ranks)
        ranks = range(backend.world_size)
        self._entrusting = next(rank for rank in ranks if keeper(rank, backend.node_ranks) == backend.rank)

    async def commit(self, generation: Generation, joiners: int, spares: int, *, is_saving: bool) -> Waiting:
        """Complete a generation after its own snapshots were taken. `joiners` and `spares`: how many this rank has heard of.
        `is_saving`: whether it is writing a checkpoint.

        Raises CollectiveMismatch on all ranks if they are not at the same step.
        """
        spread, entrusted, label = generation.spread, generation.entrusted, f"commit of step {generation.mark.step}"
        mine = _Row(spread.header.numel(), spread.payload.numel(), joiners, spares, is_saving)
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
        await _all(pending)
        generation.complete = True
        await self._backend.barrier(label=label)
        return Waiting(*(any(told) for told in zip(*((row.joiners, row.spares, row.is_saving) for row in rows), strict=True)))

    async def hand_over(self, generation: Generation, leaving: Collection[int]) -> None:
        """Copy what these ranks would take with them. When this returns on one rank, all have what they should. `generation` is the
        committed one, of the same step on all ranks. A collective."""
        planned = handovers(leaving, self._backend.node_ranks, self._alike)
        if not planned:
            return
        me, label = self._backend.rank, f"copies before ranks leave after step {generation.mark.step}"
        giving = {index: await asyncio.to_thread(self._part, generation, each.of) for index, each in enumerate(planned) if each.giver == me}
        told = torch.zeros(len(planned), 2, dtype=torch.int64, device="cpu")
        for index, part in giving.items():
            told[index] = torch.tensor([part.header.numel(), part.payload.numel()], device="cpu")
        sizes = (await self._backend.all_reduce(told, label=label)).tolist()
        pending: list[Pending[Any]] = []
        taking: list[Snapshot] = []
        for index, (each, (header_bytes, payload_bytes)) in enumerate(zip(planned, sizes, strict=True)):
            if payload_bytes and each.giver == me:
                pending += (self._backend.send(flat, each.taker, label=label) for flat in (giving[index].header, giving[index].payload))
            elif payload_bytes and each.taker == me:
                part = Snapshot()
                part.prepare(header_bytes, payload_bytes)
                pending += (self._backend.recv(flat, each.giver, label=label) for flat in (part.header, part.payload))
                taking.append(part)
        await _all(pending)
        generation.taken_over = taking
        await self._backend.barrier(label=label)

    def _part(self, generation: Generation, of: int | frozenset[int]) -> Snapshot:
        """What this rank has of a part: its own, the one that it keeps for another rank, or one that others hold, too."""
        if of == self._backend.rank:
            return generation.spread
        if isinstance(of, int):
            return generation.entrusted if generation.has_entrusted else Snapshot()
        part = Snapshot()
        part.take([piece for piece in generation.local.value()["pieces"] if Span(*piece[:3]) in self._alike[of]])
        return part


async def _all(pending: Iterable[Pending[Any]]) -> None:
    """Wait until all are done, also if one has failed: they use buffers of the caller. Raises the first error."""
    for outcome in await asyncio.gather(*pending, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
