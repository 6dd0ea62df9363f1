"""Compare plans with counts of what real training holds and sends."""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import nn

from shardnet.backend import Backend
from shardnet.config import Limits
from shardnet.fsdp import FSDP, MemoryReport, memory_report
from shardnet.planning import MemoryPlan, ModelSize, OptimizerKind, Setting, Strategy, plan
from shardnet.sharding import ShardingStrategy
from tests.fsdp.models import GPT, Block, loss_of, make_gpt, token_batches
from tests.fsdp.ranks import run_ranks

SIZES = {"vocabulary": 61, "width": 24, "heads": 3, "layers": 5}
STEPS = 2  # the first one learns in which order units are used
FULL, GRAD, HYBRID, NONE = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.HYBRID_SHARD, Strategy.NO_SHARD
PLACES = [
    *((strategy, ranks, None) for strategy in (FULL, GRAD, NONE) for ranks in (1, 2, 4)),
    (HYBRID, 4, 2),
    (HYBRID, 4, 4),
    (HYBRID, 4, 1),
]


@dataclass
class Counted:
    """One rank's memory, and what it sent in one step."""

    memory: MemoryReport
    count: dict[str, int]
    bytes: dict[str, int]


def optimizer_for(model: nn.Module, kind: OptimizerKind) -> torch.optim.Optimizer:
    if kind is OptimizerKind.ADAMW:
        return torch.optim.AdamW(model.parameters())
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if kind is OptimizerKind.SGD_MOMENTUM else 0.0)


def train(
    backend: Backend, strategy: Strategy, node: int | None, prefetch: int, kind: OptimizerKind, units: tuple[type[nn.Module], ...]
) -> Counted:
    inner = make_gpt(**SIZES)
    model = FSDP(inner, backend, units=units, strategy=ShardingStrategy(strategy), intra_node_size=node, prefetch=prefetch)
    optimizer = optimizer_for(model, kind)
    model.memory.reset_peaks()
    for batch in token_batches(STEPS, 2):
        before = {op: (counter.count, counter.bytes) for op, counter in backend.telemetry.ops.items()}
        optimizer.zero_grad()
        loss_of(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    ops = backend.telemetry.ops
    return Counted(
        memory_report(model, optimizer),
        {op: ops[op].count - before.get(op, (0, 0))[0] for op in ops},
        {op: ops[op].bytes - before.get(op, (0, 0))[1] for op in ops},
    )


@cache
def measure(
    strategy: Strategy,
    ranks: int,
    node: int | None,
    prefetch: int = 1,
    kind: OptimizerKind = OptimizerKind.ADAMW,
    units: tuple[type[nn.Module], ...] = (Block,),
) -> list[Counted]:
    """Without direct exchanges (eager_bytes=0): for tiny tensors these send more bytes."""
    return run_ranks(ranks, lambda backend: train(backend, strategy, node, prefetch, kind, units), limits=Limits(eager_bytes=0))


def size(*units: type[nn.Module]) -> ModelSize:
    with torch.device("meta"):
        return ModelSize.of_module("gpt", GPT(**SIZES), units or Block)


def columns(planned: MemoryPlan) -> list[int]:
    return [planned.parameters, planned.gradients, planned.optimizer, planned.gathered, planned.reducing]


def counted(report: MemoryReport) -> list[int]:
    held = [report.parameter_shards, report.gradient_shards, report.optimizer_state]
    return [*held, report.peak_full_parameters, report.peak_full_gradients]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("strategy", "ranks", "node"), PLACES)
def test_memory_is_what_a_run_holds(strategy: Strategy, ranks: int, node: int | None, prefetch: int) -> None:
    setting = Setting(ranks, node_size=node, prefetch=prefetch)
    (planned,) = plan(size(), setting, [strategy])
    first, *others = measure(strategy, ranks, node, prefetch)
    assert columns(planned.memory) == counted(first.memory)  # to the byte: rank 0 has the longest shards
    for seen in others:
        assert columns(planned.memory) == pytest.approx(counted(seen.memory), rel=0.02)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("strategy", [FULL, GRAD, NONE])
def test_memory_of_units_within_units_is_bounded(strategy: Strategy, prefetch: int) -> None:
    (planned,) = plan(size(Block, nn.LayerNorm), Setting(2, prefetch=prefetch), [strategy])
    seen = counted(measure(strategy, 2, None, prefetch, units=(Block, nn.LayerNorm))[0].memory)
    assert all(most >= held for most, held in zip(columns(planned.memory), seen, strict=True))
    assert planned.memory.total == pytest.approx(sum(seen), rel=0.1)


@pytest.mark.parametrize("kind", list(OptimizerKind))
def test_optimizers_keep_what_is_planned(kind: OptimizerKind) -> None:
    (planned,) = plan(size(), Setting(2, optimizer=kind), [FULL])
    assert planned.memory.optimizer == measure(FULL, 2, None, kind=kind)[0].memory.optimizer_state


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("strategy", "ranks", "node"), PLACES)
def test_traffic_is_what_a_run_sends(strategy: Strategy, ranks: int, node: int | None, prefetch: int) -> None:
    (planned,) = plan(size(), Setting(ranks, node_size=node, prefetch=prefetch), [strategy])

    def total(op: str, field: str) -> int:
        return sum(getattr(traffic, field) for traffic in planned.traffic if traffic.op == op)

    every = measure(strategy, ranks, node, prefetch)
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        assert {seen.count.get(op, 0) for seen in every} == {total(op, "count")}
        assert sum(seen.bytes.get(op, 0) for seen in every) == pytest.approx(ranks * total(op, "bytes_sent"), rel=0.01)
