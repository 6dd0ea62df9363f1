"""Collectives: the same case on both engines, with the results compared."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.copies import copies
from benchmarks.engines import Engine, Gloo, Shardnet
from benchmarks.explain import explain
from benchmarks.plan import Case, Collectives, Op, Transport
from benchmarks.race import Contender, race
from benchmarks.row import Row
from benchmarks.targets import COPIES, MEMCPY
from shardnet import Backend


class Disagreement(Exception):
    """The engines have different results, so their speeds are worth nothing."""


def measure(session: Collectives, backend: Backend) -> Iterator[Row]:
    """One row per case, the same on all ranks. A collective."""
    for case in session.cases:
        yield _measure(case, backend, session)


def _measure(case: Case, backend: Backend, session: Collectives) -> Row:
    tasks = [_Task(engine, case, backend) for engine in (Shardnet(backend), Gloo())]
    contenders = [task.contender for task in tasks]
    if session.transport is Transport.SHM and case.outstanding == 1:
        contenders += filter(None, (_memcpy(case), copies(case)))
    timings = race(contenders, case.repeats)
    median_ms = {contender.name: timing.quartiles_ms()[1] for contender, timing in zip(contenders, timings, strict=True)}
    for task in tasks:
        task.contender.prepare()  # fresh inputs: repeated in-place sums would no longer be exact in any order
        task.contender.run()
    if not torch.equal(tasks[0].result, tasks[1].result):
        raise Disagreement(f"{case.op} of {case.bytes} bytes: the results of shardnet and gloo differ on rank {backend.rank}")
    return Row.compare(
        *timings[:2],
        moved_bytes=case.outstanding * case.op.moved_bytes(case.bytes, backend.world_size),
        kind=session.kind,
        op=str(case.op),
        ranks=backend.world_size,
        bytes=case.bytes,
        outstanding=case.outstanding,
        peer="gloo",
        topology=str(session.topology),
        nodes=session.topology.nodes(backend.world_size),
        transport=str(session.transport),
        chunk_bytes=session.chunk_bytes,
        memcpy_ms=median_ms.get(MEMCPY),
        copies_ms=median_ms.get(COPIES),
        explained_ms=explain(case.op.counted_as, tasks[0].contender, backend) if session.explain else None,
    )


def _memcpy(case: Case) -> Contender:
    """The least that a collective in memory must do: write the others' data here; for an all_reduce twice, first for the sums."""
    source = torch.zeros(case.bytes, dtype=torch.uint8)
    target = torch.empty_like(source)

    def run() -> None:
        for _ in range(2 if case.op is Op.ALL_REDUCE else 1):
            target.copy_(source)

    return Contender(MEMCPY, run, calls=case.calls)


class _Task:
    """One engine at one case, with tensors of its own."""

    def __init__(self, engine: Engine, case: Case, backend: Backend) -> None:
        full = _whole_numbers(case.bytes // 4, seed=backend.rank)
        shard = full[: len(full) // backend.world_size]
        if case.op is Op.ALL_GATHER:
            self.result = torch.empty_like(full)
            self.contender = Contender(engine.name, lambda: engine.all_gather(shard, self.result), calls=case.calls)
        elif case.op is Op.REDUCE_SCATTER:
            self.result = torch.empty_like(shard)
            self.contender = Contender(engine.name, lambda: engine.reduce_scatter(full, self.result), calls=case.calls)
        elif case.op is Op.GATHER_ON_NODE:
            self._out = torch.empty_like(full)
            self.contender = Contender(engine.name, lambda: self._gather_on_node(engine, shard), calls=case.calls)
        elif case.outstanding > 1:
            self.result = torch.empty(case.outstanding, len(full))
            all_of_them = list(self.result)
            prepare = partial(self.result.copy_, full.expand_as(self.result))
            self.contender = Contender(engine.name, lambda: engine.all_reduce_at_once(all_of_them), prepare)
        else:
            self.result = torch.empty_like(full)
            prepare = partial(self.result.copy_, full)
            self.contender = Contender(engine.name, lambda: engine.all_reduce(self.result), prepare, calls=case.calls)

    def _gather_on_node(self, engine: Engine, shard: Tensor) -> None:
        self.result = engine.gather_on_node(shard, self._out)


def _whole_numbers(count: int, seed: int) -> Tensor:
    """[count] float32 whose sums are exact in any order, so that results of different algorithms are equal."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1000, 1000, (count,), generator=generator).float()
